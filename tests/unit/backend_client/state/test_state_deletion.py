"""Deletion of whole state variables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from backend_client.state.keyed_state import table_key
from backend_client.state.state_deletion import deletions, hide
from backend_client.table.state_table import StateTable
from storage.key_groups import KeyGroupRange

GROUPS = KeyGroupRange(2, 3)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[StateTable]:
    """Return a table with 50 keys of each of three variables in two key groups."""
    table = StateTable.open(tmp_path)
    keys = [table_key(group, state, b"%02d" % key) for group in (2, 3) for state in (1, 2, 3) for key in range(50)]
    table.advance(((key, b"v") for key in keys), "0.0.x")
    yield table
    table.close()


def test_all_entries_are_deleted_in_bounded_parts(table: StateTable) -> None:
    """Every entry of the variables is deleted, no other one is, and no chunk grows beyond the bound."""
    parts = list(deletions(table.scan, GROUPS, [1, 3], bytes_max=200))

    assert {key[2:4] for part in parts for key in part} == {b"\0\1", b"\0\3"}
    assert sum(map(len, parts)) == 200
    assert max(map(len, parts)) == 20


def test_deleted_entries_are_hidden(table: StateTable) -> None:
    """The batch that deletes a variable does not see it; others stay, and without deletion nothing is hidden."""
    get, scan = hide(table.get, table.scan, [2])

    assert get(table_key(2, 2, b"00")) is None
    assert list(scan(table_key(2, 2, b""))) == []
    assert get(table_key(2, 1, b"00")) == b"v"
    assert len(list(scan(table_key(3, 3, b"")))) == 50
    assert hide(table.get, table.scan, []) == (table.get, table.scan)
