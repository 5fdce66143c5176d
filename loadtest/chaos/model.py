"""The model of a job's state under chaos: its tables' content, and changes that identify their set."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

from storage.change_set import decode_change_set
from storage.key_groups import KeyGroupRange

OPERATORS = ("counts", "joins")
MAX_PARALLELISM = 128

Table = dict[bytes, bytes]
State = dict[str, Table]
Change = dict[bytes, bytes | None]


class Violation(AssertionError):  # noqa: N818 - an error of the service, not of this program
    """The service violated a guarantee."""


def draw_changes(chance: random.Random, table: Table, key_groups: KeyGroupRange, stamp: bytes) -> Change:
    """
    Return changes of one set: a key of its own, keys that it shares with other sets, and deletions of old ones.

    Args:
        chance: Draws them.
        table: Content of the operator's table.
        key_groups: Key groups of the task.
        stamp: Unique to the set.
    """

    def key(name: bytes) -> bytes:
        return chance.randint(key_groups.first, key_groups.last).to_bytes(2, "big") + b"\0\0" + name

    size = chance.choice((20, 20, 20, 2_000, 200_000))
    made: Change = {key(b"own " + stamp): stamp + chance.randbytes(size)}
    for _ in range(chance.randint(0, 20)):
        group = chance.randint(key_groups.first, key_groups.last) // 8 * 8
        if key_groups.contains(group):
            made[group.to_bytes(2, "big") + b"\0\0shared"] = stamp + chance.randbytes(50)
    old = [k for k in table if key_groups.contains(int.from_bytes(k[:2], "big")) and b"own" in k]
    for name in chance.sample(old, max(0, len(old) - 8)):
        made[name] = None
    return made


def apply(table: Table, changes: Change) -> None:
    """Apply changes to a table."""
    for key, value in changes.items():
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value


def applied(table: Table, changes: Change) -> Table:
    """Return a copy of a table with changes applied."""
    result = dict(table)
    apply(result, changes)
    return result


def table_of(frames: Iterable[tuple[Mapping[str, Any], bytes]], what: str) -> Table:
    """
    Return the table that a restore returns.

    Args:
        frames: Headers and payloads of the answer.
        what: Name of the table for the error.

    Raises:
        Violation: The answer ends with an error.
    """
    table: Table = {}
    for header, payload in frames:
        if header["kind"] == "error":
            raise Violation(f"{what} cannot be restored: {header['error']}")
        if header["kind"] == "segment":
            apply(table, dict(decode_change_set(payload, str(header["object"]))))
    return table
