"""
Requests to change the parallelism of a running query's operators: how an administrator reaches a driver.

A request belongs to the epoch in which it is made, so it ends with the driver's run. It is kept among a job's hints
(`dstl_service.registry.hints`), since losing it loses nothing but the request. Blocking I/O.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from dstl_service.formats.keys import hint_key
from dstl_service.registry.lives import LifeFolder
from storage.errors import NotFoundError
from storage.object_store import ObjectStore
from storage.stored_json import parse_json
from storage.validation import KEY_GROUP_MAX

_HINT = "parallelism"


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

    def of(self, epoch: int) -> dict[str, int]:
        """Return the requested parallelism by operator; empty if nothing readable was requested in this epoch."""
        try:
            document = parse_json(self._store.get(self._key))
        except (NotFoundError, ValueError):
            return {}
        if not isinstance(document, dict) or document.get("epoch") != epoch:
            return {}
        wanted = document.get("operators")
        return dict(wanted) if isinstance(wanted, dict) and all(map(_is_parallelism, wanted.values())) else {}

    def put(self, epoch: int, wanted: Mapping[str, int]) -> None:
        """Replace all requests."""
        document = {"epoch": epoch, "operators": dict(wanted)}
        self._store.put(self._key, json.dumps(document, separators=(",", ":")).encode())

    @property
    def _key(self) -> str:
        return hint_key(self._folder.path, _HINT)


def _is_parallelism(value: object) -> bool:
    return type(value) is int and 1 <= value <= KEY_GROUP_MAX + 1
