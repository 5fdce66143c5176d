"""Whether every key has the count that it must have, by the rows that a run has left. Lines are ``key,count``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path


def wrong_keys(rows: Iterable[tuple[int, int]], events: int, keys: int) -> int:
    """
    Return how many keys have another count than they must have.

    The highest count of a key is its last. Each key has the same number of events.

    Args:
        rows: Key and count of each row, in any order; rows may repeat.
        events: A multiple of `keys`.
        keys: Number of keys.
    """
    counts = [0] * keys
    strangers = 0
    for key, count in rows:
        if 0 <= key < keys:
            counts[key] = max(counts[key], count)
        else:
            strangers += 1
    return strangers + sum(count != events // keys for count in counts)


def rows_of_files(folder: Path) -> Iterator[tuple[int, int]]:
    """Yield the rows in all files below a folder, without headers and lines that are cut off."""
    for path in sorted(folder.rglob("*")):
        if path.name.startswith((".", "_")) or not path.is_file():
            continue
        with path.open(encoding="ascii") as file:
            for line in file:
                key, _, rest = line.replace('"', "").partition(",")
                count = rest.split(",")[0].rstrip("\n")
                if line.endswith("\n") and key.isdigit() and count.isdigit():
                    yield int(key), int(count)
