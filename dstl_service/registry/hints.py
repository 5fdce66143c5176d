"""
Numbers that save requests: kept beside a job's registry, overwritten without a condition, never relied upon.

A hint may be missing, unreadable or out of date; a reader gets the same answer without it, only with more requests.
That holds within one history of a job; a rebuild begins another one and deletes the hints. Blocking I/O.
"""

from __future__ import annotations

import json

from dstl_service.formats.keys import hint_key, hints_prefix
from storage.errors import NotFoundError
from storage.object_store import ObjectStore
from storage.stored_json import parse_json
from storage.validation import CHECKSUM_MAX


def read_hint(store: ObjectStore, folder: str, name: str) -> tuple[int, ...]:
    """Return a hint's numbers; none if the hint is missing or unreadable."""
    try:
        numbers = parse_json(store.get(hint_key(folder, name)))
    except (NotFoundError, ValueError):
        return ()
    # A number out of bounds is not a place: a negative one would show an empty register.
    is_sound = isinstance(numbers, list) and all(type(it) is int and 0 <= it <= CHECKSUM_MAX for it in numbers)
    return tuple(numbers) if is_sound else ()


def write_hint(store: ObjectStore, folder: str, name: str, *numbers: int) -> None:
    """Write a hint for later readers."""
    store.put(hint_key(folder, name), json.dumps(numbers).encode())


def forget_hints(store: ObjectStore, folder: str) -> None:
    """Delete the hints of a history that is no longer valid; no owner of the job may be running."""
    store.delete([info.key for info in store.list(hints_prefix(folder))])
