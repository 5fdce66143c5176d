"""
Deletion of whole state variables: each of their entries is deleted in the log, once.

A scan of the table, which is at the base, finds the entries. Their deletions are sent in change sets of bounded size
before the batch's own changes, and the batch does not see them. To a restore, a compaction and a snapshot they are
ordinary deletions.
No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from backend_client.state.keyed_state import table_key
from storage.key_groups import KeyGroupRange


def deletions(
    scan: Callable[[bytes], Iterator[tuple[bytes, bytes]]],
    key_groups: KeyGroupRange,
    state_ids: Iterable[int],
    bytes_max: int,
) -> Iterator[dict[bytes, bytes | None]]:
    """Yield deletions of all entries of these variables, in dictionaries of about `bytes_max` bytes."""
    changes: dict[bytes, bytes | None] = {}
    size = 0
    for state_id in state_ids:
        for key_group in range(key_groups.first, key_groups.last + 1):
            for key, _ in scan(table_key(key_group, state_id, b"")):
                changes[key] = None
                size += len(key) + 4
                if size >= bytes_max:
                    yield changes
                    changes, size = {}, 0
    if changes:
        yield changes


def hide(
    get: Callable[[bytes], bytes | None],
    scan: Callable[[bytes], Iterator[tuple[bytes, bytes]]],
    state_ids: Iterable[int],
) -> tuple[Callable[[bytes], bytes | None], Callable[[bytes], Iterator[tuple[bytes, bytes]]]]:
    """Return a table's `get` and `scan` that hide the entries of these variables."""
    hidden = {table_key(0, state_id, b"")[2:] for state_id in state_ids}
    if not hidden:
        return get, scan
    return (
        lambda key: None if key[2:4] in hidden else get(key),
        lambda prefix: iter(()) if prefix[2:4] in hidden else scan(prefix),
    )
