"""Value types refuse invalid values, and read back their own output."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from storage.errors import InvalidInputError
from storage.key_groups import KeyGroupRange
from storage.model import (
    ChangeSetId,
    MaterializationHandle,
    Segment,
    SegmentEntry,
    SegmentHandle,
    SegmentKind,
    Writer,
)
from storage.validation import COUNT_MAX, NUMBER_MAX, validate_name
from tests.unit.storage.segments import segment

ENTRY = SegmentEntry(segment(5, b"x").id, KeyGroupRange(20, 23), 3, 16, 1, 0xABC)
HANDLE = SegmentHandle("segments/host/1.seg", 500, ENTRY)
SNAPSHOT = MaterializationHandle("op", KeyGroupRange(0, 9), 3, "uid", "job/materialized/op/uid.json", 1 << 40)


@pytest.mark.parametrize("name", ["a", "Job_1.v2-x", "_", "9", "a" * 128])
def test_good_name_is_returned(name: str) -> None:
    """A valid name is returned unchanged."""
    assert validate_name("job", name) == name


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a b", "ä", "a\n", "a" * 129, None, 3])
def test_bad_name_is_refused(name: Any) -> None:
    """A name that could leave a folder or break a key is refused, with the valid characters."""
    with pytest.raises(InvalidInputError, match=r"job name .*A-Za-z0-9"):
        validate_name("job", name)


@pytest.mark.parametrize(("first", "last"), [(-1, 0), (1, 0), (0, 32_768), (True, 1), (0.0, 1)])
def test_bad_range_is_refused(first: Any, last: Any) -> None:
    """Ranges are within 0..32767 and not empty."""
    with pytest.raises(InvalidInputError):
        KeyGroupRange(first, last)


def test_range_is_inclusive() -> None:
    """Both ends belong to a range."""
    groups = KeyGroupRange(4, 7)
    assert len(groups) == 4
    assert [group for group in range(10) if groups.contains(group)] == [4, 5, 6, 7]
    assert groups.intersects(KeyGroupRange(7, 9))
    assert not groups.intersects(KeyGroupRange(8, 9))
    assert groups.covers(groups)
    assert not groups.covers(KeyGroupRange(7, 8))


def test_range_text_is_read_back() -> None:
    """Texts have a fixed width, so they sort like ranges."""
    assert KeyGroupRange(0, 31).to_text() == "00000-00031"
    assert KeyGroupRange.parse("00000-00031") == KeyGroupRange(0, 31)


@pytest.mark.parametrize("text", ["", "0-31", "00000-0003x", "00031-00000", "00000-99999", "00000-00031\n", 7])
def test_bad_range_text_is_refused(text: Any) -> None:
    """Only the output of `to_text` is accepted."""
    with pytest.raises(InvalidInputError):
        KeyGroupRange.parse(text)


def test_higher_epoch_beats_higher_attempt() -> None:
    """I4: writers order by epoch first."""
    assert Writer(2, 0) > Writer(1, NUMBER_MAX)


@pytest.mark.parametrize("value", [-1, NUMBER_MAX + 1, 1.0, "1", None, True])
def test_bad_number_is_refused(value: Any) -> None:
    """Numbers are integers, not negative, and exact in every JSON reader."""
    with pytest.raises(InvalidInputError):
        Writer(value, 0)
    with pytest.raises(InvalidInputError):
        ChangeSetId("job", "op", value, Writer(0, 0), 0, 0)


def test_values_are_frozen_and_slotted() -> None:
    """A shared value cannot be changed."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        HANDLE.object_key = "other"  # type: ignore[misc]  # refused
    assert not hasattr(HANDLE, "__dict__")


def test_segment_does_not_show_its_payload() -> None:
    """A segment in a log line does not show 10 MB."""
    assert "payload" not in repr(segment(0, b"payload"))


def test_segment_counts_bytes_not_items() -> None:
    """The size of a payload is in bytes, whatever the item size of its view."""
    made = Segment.of(ENTRY.id, ENTRY.key_groups, 0, memoryview(bytes(16)).cast("Q"))
    assert made.size_bytes == 16


def test_bad_count_is_refused() -> None:
    """A count fits 31 bits."""
    with pytest.raises(InvalidInputError, match="count"):
        dataclasses.replace(ENTRY, count=COUNT_MAX + 1)


@pytest.mark.parametrize("value", [ENTRY.id, ENTRY, HANDLE, SNAPSHOT])
def test_dict_is_read_back(value: ChangeSetId | SegmentEntry | SegmentHandle | MaterializationHandle) -> None:
    """I15: values travel as plain JSON."""
    assert type(value).from_dict(json.loads(json.dumps(value.to_dict()))) == value


@pytest.mark.parametrize("field", sorted(HANDLE.to_dict().keys() - {"object"}))
@pytest.mark.parametrize("bad", [None, -1, 1.5, "../x\n", True, [], {}, 2**64])
def test_bad_field_of_dict_is_refused(field: str, bad: Any) -> None:
    """I15: every field is checked for type and bounds before use."""
    data = {**HANDLE.to_dict(), field: bad}
    with pytest.raises(InvalidInputError):
        SegmentHandle.from_dict(data)


@pytest.mark.parametrize("bad", [None, 1, "", []])
def test_bad_object_key_of_dict_is_refused(bad: Any) -> None:
    """A key is text; the store decides which texts are valid."""
    with pytest.raises(InvalidInputError, match="object key"):
        SegmentHandle.from_dict({**HANDLE.to_dict(), "object": bad})


@pytest.mark.parametrize("data", [{}, {**HANDLE.to_dict(), "more": 1}, [], None, "text"])
def test_other_fields_are_refused(data: Any) -> None:
    """Missing and unknown fields are errors: another layout has another version."""
    with pytest.raises(InvalidInputError, match="segment handle"):
        SegmentHandle.from_dict(data)


def test_handle_beyond_its_object_is_refused() -> None:
    """A segment ends within its object."""
    with pytest.raises(InvalidInputError, match="ends after"):
        SegmentHandle("k", 16, ENTRY)


@pytest.mark.parametrize("kind", list(SegmentKind))
def test_kind_survives(kind: SegmentKind) -> None:
    """A segment's kind is read back from its entry; the usual kind costs no bytes."""
    entry = dataclasses.replace(ENTRY, kind=kind)

    assert SegmentEntry.from_dict(entry.to_dict()) == entry
    assert ("kind" in entry.to_dict()) == (kind is not SegmentKind.CHANGES)


def test_unknown_kind_is_refused() -> None:
    """A segment of a newer version's kind is not read as changes."""
    with pytest.raises(InvalidInputError, match="kind"):
        SegmentEntry.from_dict({**ENTRY.to_dict(), "kind": "surprise"})
