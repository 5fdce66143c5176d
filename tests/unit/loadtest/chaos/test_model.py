"""The model of a job's state in the chaos test."""

from __future__ import annotations

import random

import pytest

from loadtest.chaos.model import Table, Violation, applied, draw_changes, table_of
from storage.change_set import encode_change_set
from storage.key_groups import KeyGroupRange

GROUPS = KeyGroupRange(8, 31)


def test_every_set_has_a_key_of_its_own() -> None:
    """Sets of one table differ by their stamps, stay within the task's key groups, and keep the table small."""
    chance, table = random.Random(3), Table()
    for number in range(40):
        changes = draw_changes(chance, table, GROUPS, b"stamp %d" % number)
        assert any(key.endswith(b"own stamp %d" % number) for key in changes)
        assert all(GROUPS.contains(int.from_bytes(key[:2], "big")) for key in changes)
        table = applied(table, changes)

    assert sum(b"own" in key for key in table) == 9


def test_changes_leave_the_former_table() -> None:
    """Values are put, a null deletes, and the previous table stays unchanged."""
    before = {b"a": b"1", b"b": b"2"}

    assert applied(before, {b"a": None, b"c": b"3", b"x": None}) == {b"b": b"2", b"c": b"3"}
    assert before == {b"a": b"1", b"b": b"2"}


def test_restored_table_has_the_changes_of_the_segments() -> None:
    """Segments are applied in order; other frames have no changes."""
    frames = [
        ({"kind": "begin"}, b""),
        ({"kind": "segment", "object": "one"}, encode_change_set({b"a": b"1", b"b": b"2"})),
        ({"kind": "segment", "object": "two"}, encode_change_set({b"a": None})),
    ]

    assert table_of(frames, "job: counts") == {b"b": b"2"}


def test_error_of_a_restore_is_a_violation() -> None:
    """An answer that ends with an error is not a table."""
    with pytest.raises(Violation, match="job: counts cannot be restored: gone"):
        table_of([({"kind": "error", "error": "gone"}, b"")], "job: counts")
