"""For any segments, encoded data is decoded, and all damage is found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import CorruptDataError
from storage.key_groups import KeyGroupRange
from storage.model import ChangeSetId, Segment, SegmentHandle, Writer
from storage.segment_format import decode_object, encode_object
from storage.validation import KEY_GROUP_MAX, NUMBER_MAX

KEY = "job/segments/host/1.seg"

names = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,20}", fullmatch=True)
numbers = st.integers(0, NUMBER_MAX)
ranges = st.tuples(st.integers(0, KEY_GROUP_MAX), st.integers(0, KEY_GROUP_MAX)).map(
    lambda ends: KeyGroupRange(min(ends), max(ends))
)
writers = st.builds(Writer, numbers, numbers)
ids = st.builds(ChangeSetId, names, names, numbers, writers, st.integers(0, KEY_GROUP_MAX), numbers)
segments = st.builds(Segment.of, ids, ranges, st.integers(0, 2**31 - 1), st.binary(max_size=200))
objects = st.lists(segments, min_size=1, max_size=8, unique_by=lambda segment: segment.id)


def encode(wanted: list[Segment]) -> bytes:
    """Return the bytes of an object."""
    return b"".join(encode_object(wanted)[0])


@given(objects)
def test_any_object_is_read_back(wanted: list[Segment]) -> None:
    """I10: ids, ranges, counts and payloads survive, and so do handles made of the entries."""
    data = encode(wanted)
    decoded = decode_object(data, KEY)
    assert [(entry.id, entry.key_groups, entry.count, bytes(payload)) for entry, payload in decoded] == [
        (segment.id, segment.key_groups, segment.count, segment.payload) for segment in wanted
    ]
    for entry, _ in decoded:
        handle = SegmentHandle(KEY, len(data), entry)
        assert SegmentHandle.from_dict(handle.to_dict()) == handle


@given(objects, st.data())
def test_any_overwritten_bytes_are_found(wanted: list[Segment], draw: st.DataObject) -> None:
    """I10: any overwritten bytes anywhere are an error."""
    data = encode(wanted)
    begin = draw.draw(st.integers(0, len(data) - 1))
    patch = draw.draw(st.binary(min_size=1, max_size=min(64, len(data) - begin)))
    damaged = data[:begin] + patch + data[begin + len(patch) :]
    if damaged != data:
        with pytest.raises(CorruptDataError, match=KEY):
            decode_object(damaged, KEY)


@given(objects, st.data())
def test_any_cut_is_found(wanted: list[Segment], draw: st.DataObject) -> None:
    """I10: an object that lacks any run of its bytes is an error."""
    data = encode(wanted)
    begin = draw.draw(st.integers(0, len(data) - 1))
    end = draw.draw(st.integers(begin + 1, len(data)))
    with pytest.raises(CorruptDataError, match=KEY):
        decode_object(data[:begin] + data[end:], KEY)


@given(objects, st.binary(min_size=1, max_size=300), st.data())
def test_any_extension_is_found(wanted: list[Segment], more: bytes, draw: st.DataObject) -> None:
    """I10: an object with bytes inserted anywhere is an error."""
    data = encode(wanted)
    place = draw.draw(st.integers(0, len(data)))
    damaged = data[:place] + more + data[place:]
    with pytest.raises(CorruptDataError, match=KEY):
        decode_object(damaged, KEY)


@given(st.binary(max_size=500))
def test_random_bytes_are_refused(data: bytes) -> None:
    """I10, I15: any bytes in the store are refused with one kind of error, and nothing in them is executed."""
    with pytest.raises(CorruptDataError, match=KEY):
        decode_object(data, KEY)


@given(objects, objects)
def test_mixed_objects_are_found(one: list[Segment], other: list[Segment]) -> None:
    """I10: the start of one object with the end of another, as left by a torn replacement, is an error."""
    first, second = encode(one), encode(other)
    damaged = first[: len(second)] + second[len(first) :]
    if damaged not in (first, second):
        with pytest.raises(CorruptDataError, match=KEY):
            decode_object(damaged, KEY)
