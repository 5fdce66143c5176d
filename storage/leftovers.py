"""Removes what killed processes leave in a store: probe objects and temporary files."""

from __future__ import annotations

import re

from storage.clock import Clock
from storage.local_store import LocalStore
from storage.object_store import PROBE_FOLDER, ObjectStore

# A probe's name is a unique id. A job may be named like the folder, but none of its objects matches this.
_PROBE = re.compile("[0-9a-f]{32}")


def remove_leftovers(store: ObjectStore, clock: Clock, age_min_ms: int, folder: str = PROBE_FOLDER) -> int:
    """
    Delete the leftovers of unfinished calls; return how many there were.

    Args:
        store: The store to clean; its other objects stay.
        clock: Compared with the store's times of modification.
        age_min_ms: Minimum age; must exceed the duration of any call, because younger ones may belong to running calls.
        folder: The folder of the probes.

    Raises:
        UnavailableError: The store does not answer; some leftovers may already be deleted.
    """
    newest_ms = clock.now_ms() - age_min_ms
    probes = [
        info.key
        for info in store.list(f"{folder}/")
        if info.modified_ms <= newest_ms and _PROBE.fullmatch(info.key.removeprefix(f"{folder}/"))
    ]
    store.delete(probes)
    temporary = store.remove_leftovers(age_min_ms) if isinstance(store, LocalStore) else 0
    return len(probes) + temporary


def remove_empty_folders(store: ObjectStore, folder: str, age_min_ms: int) -> int:
    """Remove empty folders directly below one, if the store has folders; return how many."""
    return store.remove_empty_folders(folder, age_min_ms) if isinstance(store, LocalStore) else 0
