"""
Calls between services: the coordinator asks the sidecars of other hosts to make their sets durable.

Blocking; the service calls it in threads. The standard library's client is enough: a call per host and checkpoint.
"""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from dstl_service.wire import ChangeSetRef, PersistRequest
from storage.errors import LostChangesError, UnavailableError, error_from_dict
from storage.model import SegmentHandle


class PeerClient:
    """
    Talks to other services with this service's own token.

    Args:
        own_token: Asked before each call: the token to show, or None.
        timeout_s: How long a call may take.
        ca_file: Certificates by which services are known; None: those of the system.
    """

    def __init__(self, own_token: Callable[[], str | None], timeout_s: float, ca_file: Path | None = None) -> None:
        self._own_token = own_token
        self._timeout_s = timeout_s
        # Services talk to each other directly, whatever proxy the environment names for the outside, and go nowhere
        # else: an answer that sends the token to another address is not followed.
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca_file)),
            urllib.request.HTTPErrorProcessor(),
            urllib.request.HTTPDefaultErrorHandler(),
        ):
            self._opener.add_handler(handler)

    def persist(
        self, url: str, job: str, refs: Sequence[ChangeSetRef], *, wait: bool, note: str | None = None
    ) -> list[SegmentHandle]:
        """
        Have the service at `url` persist `refs` and a note; return the handles in order, or nothing without `wait`.

        Raises:
            LostChangesError: That service does not hold a set, or cannot be reached: its sets count as lost.
        """
        body = json.dumps(asdict(PersistRequest(max(ref.epoch for ref in refs), list(refs), wait, note))).encode()
        headers = {"content-type": "application/json"}
        if token := self._own_token():
            headers["authorization"] = f"Bearer {token}"
        request = urllib.request.Request(f"{url}/v1/jobs/{job}/persist", body, headers)  # noqa: S310 - advertised by a service
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            try:
                reported = error_from_dict(json.load(error))
            except ValueError:
                reported = UnavailableError(f"service {url} answered {error.code}")
            raise reported from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise LostChangesError(
                f"service {url} cannot be reached: {error}; its change sets count as lost"
            ) from error
        return [SegmentHandle.from_dict(handle) for handle in answer["handles"]]
