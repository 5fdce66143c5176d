"""
The client's part of links: a task has its sidecar connect to the coordinator; the driver asks for silent hosts.

Without a link nothing is lost: the task then makes its change sets durable itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict

from backend_client.service.client import ServiceClient
from dstl_service.wire import ChangeSetRef, LinkAddress, Linked
from storage.errors import DstlError

logger = logging.getLogger("backend_client")

_ASKED_AGAIN_S = 10.0
"""How long an answer holds: a sidecar connects again by itself, and the coordinator waits for it a few seconds."""
_PATIENCE_S = 5.0
_ANY_PROCESS = ""
"""Stands for the sidecar's process where its id is not known: it has taken in nothing."""

_found: dict[tuple[str, str, str], tuple[float, str | None]] = {}
"""The last answer of a process of the sidecar, by job, token and its id: its time, and the coordinator's id or None."""


def linked_coordinator(client: ServiceClient, job: str, address: LinkAddress, service_id: str) -> str | None:
    """
    Return the id of the coordinator to which this host's sidecar has a link; None if it cannot have one now.

    Args:
        client: The sidecar's client.
        job: Name of the job.
        address: Where the job's coordinator accepts links.
        service_id: The sidecar's process; its successor has no link until it is asked.
    """
    now_s = time.monotonic()
    found = _found.get((job, address.token, service_id))
    if found is not None and now_s - found[0] < _ASKED_AGAIN_S:
        return found[1]
    try:
        linked = Linked(**client.post(f"/v1/jobs/{job}/links", asdict(address), patience_s=_PATIENCE_S))
    except DstlError as error:
        linked = Linked(None, str(error))
    if linked.coordinator_id is None:
        logger.warning(
            "each task of this host stores its own change sets, because its sidecar does not reach the coordinator at "
            "%s port %d: %s; have executors reach the driver's host there (link_port sets the port)",
            address.host,
            address.port,
            linked.why_not,
        )
    for place in [place for place, (asked_s, _) in _found.items() if now_s - asked_s >= _ASKED_AGAIN_S]:
        del _found[place]
    _found[job, address.token, service_id] = (time.monotonic(), linked.coordinator_id)
    return linked.coordinator_id


def silent_hosts(client: ServiceClient, job: str) -> list[str]:
    """Return the addresses of hosts that stopped sending without closing their link to the coordinator."""
    return [str(address) for address in client.get(f"/v1/jobs/{job}/silent-hosts")["addresses"]]


def link_to_read(client: ServiceClient, job: str, address: LinkAddress | None, refs: Sequence[ChangeSetRef]) -> None:
    """
    Have this host's sidecar connect if only the coordinator may reach the change sets that the references name.

    The task may be the first of the job on this host, and so far only tasks with changes had the sidecar connect.

    Args:
        client: The sidecar's client.
        job: Name of the job.
        address: Where the job's coordinator accepts links; None if it does not.
        refs: The change sets to be read.
    """
    if address is not None and any(ref.handle is None and ref.service_url is None for ref in refs):
        linked_coordinator(client, job, address, _ANY_PROCESS)
