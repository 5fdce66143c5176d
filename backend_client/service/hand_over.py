"""
The task's part of materialization: it makes a snapshot in milliseconds; the sidecar does the rest.

Nothing here may fail the task (I13): a missing snapshot is made later, and until then the log suffices.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict

from backend_client.service.client import ServiceClient
from backend_client.table.state_table import StateTable
from dstl_service.wire import CheckpointRef, SnapshotRequest
from storage.errors import DstlError
from storage.key_groups import KeyGroupRange

logger = logging.getLogger("backend_client")

_PATIENCE_S = 5.0


def hand_over_snapshot(
    table: StateTable,
    client: ServiceClient,
    job: str,
    operator: str,
    key_groups: KeyGroupRange,
    version: CheckpointRef,
) -> bool:
    """Make a snapshot of a table at `version` for the sidecar to store; return whether the sidecar accepted it."""
    if table.version != version.to_text():
        logger.error("no snapshot: the table is at %s, it should be at %s", table.version, version.to_text())
        return False
    started = time.perf_counter()
    try:
        with table.making_snapshot() as folder:
            made = time.perf_counter()
            request = SnapshotRequest(operator, key_groups.first, key_groups.last, version.to_text(), str(folder))
            client.post(f"/v1/jobs/{job}/materializations", asdict(request), patience_s=_PATIENCE_S)
    except (DstlError, OSError) as error:
        logger.warning("operator %s, key groups %s: no snapshot this time: %s", operator, key_groups.to_text(), error)
        return False
    logger.info(
        "operator %s, key groups %s: snapshot made in %.1f ms, handed over in %.1f ms",
        operator,
        key_groups.to_text(),
        (made - started) * 1000,
        (time.perf_counter() - made) * 1000,
    )
    return True
