"""
Requests to change the parallelism of a running query's operators: how an administrator reaches a driver.

A request belongs to the epoch in which it is made, so it ends with the driver's run. It is kept among a job's hints
(`dstl_service.registry.hints`), since losing it loses nothing but the request. Each has an id: the same number may be
requested again, after the driver's own rule has changed it in between. Blocking I/O.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from dstl_service.formats.keys import hint_key
from dstl_service.registry.lives import LifeFolder
from storage.errors import NotFoundError
from storage.object_store import ObjectStore
from storage.stored_json import parse_json
from storage.validation import KEY_GROUP_MAX

_HINT = "parallelism"
_ID_CHARS_MAX = 64


@dataclass(frozen=True, slots=True)
class WantedParallelism:
    """
    A request.

    Args:
        parallelism: Number of partitions.
        request: Differs for each request; empty for one of an earlier version.
    """

    parallelism: int
    request: str = ""


class ParallelismRequests:
    """
    The requests for one job.

    Args:
        store: The storage.
        folder: The folder of the job's registry.
    """

    def __init__(self, store: ObjectStore, folder: LifeFolder) -> None:
        self._store = store
        self._folder = folder

    def of(self, epoch: int) -> dict[str, WantedParallelism]:
        """Return the newest request by operator; empty if nothing readable was requested in this epoch."""
        try:
            document = parse_json(self._store.get(self._key))
        except (NotFoundError, ValueError):
            return {}
        if not isinstance(document, dict) or document.get("epoch") != epoch:
            return {}
        wanted, ids = document.get("operators"), document.get("requests", {})
        if not isinstance(wanted, dict) or not all(map(_is_parallelism, wanted.values())):
            return {}
        known = {name: request for name, request in ids.items() if _is_id(request)} if isinstance(ids, dict) else {}
        return {name: WantedParallelism(number, known.get(name, "")) for name, number in wanted.items()}

    def put(self, epoch: int, wanted: Mapping[str, WantedParallelism]) -> None:
        """Replace all requests."""
        operators = {name: one.parallelism for name, one in wanted.items()}
        document = {"epoch": epoch, "operators": operators, "requests": {n: one.request for n, one in wanted.items()}}
        self._store.put(self._key, json.dumps(document, separators=(",", ":")).encode())

    @property
    def _key(self) -> str:
        return hint_key(self._folder.path, _HINT)


def _is_parallelism(value: object) -> bool:
    return type(value) is int and 1 <= value <= KEY_GROUP_MAX + 1


def _is_id(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _ID_CHARS_MAX
