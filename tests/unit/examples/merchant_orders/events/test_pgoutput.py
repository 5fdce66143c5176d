"""pgoutput's messages, written as its documentation lays them out."""

from __future__ import annotations

import struct
from datetime import UTC, datetime

import pytest

from examples.merchant_orders.events.pgoutput import Commit, Decoder, RowChange

BIGINT, TEXT = 20, 25
COMMITTED_US = 1_000_000 * 86_400 * 366  # the first day of 2001


def text(value: str) -> bytes:
    return value.encode() + b"\0"


def row(*values: str | int | None) -> bytes:
    """Return a row; a number stands for a value that is left alone."""

    def field(value: str | int | None) -> bytes:
        if value is None:
            return b"n"
        return b"u" if isinstance(value, int) else b"t" + struct.pack(">I", len(value.encode())) + value.encode()

    return struct.pack(">H", len(values)) + b"".join(map(field, values))


def relation(oid: int = 7) -> bytes:
    columns = [("id", BIGINT), ("note", TEXT)]
    encoded = b"".join(b"\1" + text(name) + struct.pack(">Ii", kind, -1) for name, kind in columns)
    return b"R" + struct.pack(">I", oid) + text("public") + text("notes") + b"f" + struct.pack(">H", 2) + encoded


def begin(transaction: int = 5) -> bytes:
    return b"B" + struct.pack(">qqI", 90, COMMITTED_US, transaction)


def change(kind: str, *parts: bytes, oid: int = 7) -> bytes:
    return kind.encode() + struct.pack(">I", oid) + b"".join(parts)


def decoded(*messages: bytes) -> RowChange | Commit | None:
    """Decode messages after a table has been made known; return the last one's result."""
    decoder = Decoder()
    found: RowChange | Commit | None = None
    for number, message in enumerate([begin(), relation(), *messages]):
        found = decoder.decode(100 + number, message)
    return found


@pytest.mark.parametrize(
    ("message", "operation", "before", "after"),
    [
        (change("I", b"N", row("1", None)), "insert", None, {"id": "1", "note": None}),
        (change("U", b"N", row("1", "é")), "update", None, {"id": "1", "note": "é"}),
        (
            change("U", b"O", row("1", "a"), b"N", row("1", "b")),
            "update",
            {"id": "1", "note": "a"},
            {"id": "1", "note": "b"},
        ),
        (change("U", b"K", row("1", None), b"N", row("2", "a")), "update", None, {"id": "2", "note": "a"}),
        (change("D", b"O", row("1", "a")), "delete", {"id": "1", "note": "a"}, None),
        (change("D", b"K", row("1", None)), "delete", {"id": "1", "note": None}, None),
    ],
)
def test_row_change(message: bytes, operation: str, before: object, after: object) -> None:
    """A change has the row before and after, its table with types, its position, and its transaction."""
    moment = datetime(2001, 1, 1, tzinfo=UTC)
    types = {"id": BIGINT, "note": TEXT}

    assert decoded(message) == RowChange("notes", operation, before, after, types, 102, 5, moment)  # type: ignore[arg-type]


def test_value_that_an_update_left_alone_is_that_of_the_old_row() -> None:
    """A large value that was not changed is not sent again with the new row."""
    found = decoded(change("U", b"O", row("1", "large"), b"N", row("2", 0)))

    assert isinstance(found, RowChange)
    assert found.after == {"id": "2", "note": "large"}


def test_commit_has_the_position_behind_it() -> None:
    """The slot may be advanced to the end of the commit, not to its beginning."""
    assert decoded(b"C" + struct.pack(">Bqqq", 0, 200, 208, COMMITTED_US)) == Commit(208)


@pytest.mark.parametrize("kind", ["O", "Y", "M"])
def test_messages_about_no_row_are_left_out(kind: str) -> None:
    """Origins, types and messages of applications are no changes."""
    assert decoded(kind.encode() + b"\0" * 20) is None


@pytest.mark.parametrize("kind", ["T", "S", "?"])
def test_unknown_message_is_refused(kind: str) -> None:
    """A message that is not understood, such as a truncation, is an error: skipped, it would lose a change."""
    with pytest.raises(ValueError, match=f"message '{kind}' at 102 is unknown".replace("?", r"\?")):
        decoded(kind.encode() + b"\0" * 20)


def test_table_that_has_changed_is_learnt_anew() -> None:
    """A row that does not fit the table's columns is refused."""
    with pytest.raises(ValueError, match="has not the columns id, note"):
        decoded(change("I", b"N", row("1")))
