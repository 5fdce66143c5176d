"""Output in the log: order, sizes, damage."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest

from backend_client.sinks.records import change_sets, epoch_of, record_batches
from storage.change_set import decode_columns, encode_change_set
from storage.errors import CorruptDataError


def test_rows_come_back_in_order_and_in_parts_of_the_size() -> None:
    """Batches of any size are divided, empty ones vanish, and every part can be sent alone."""
    rows = [{"k": f"key {number}", "v": "x" * (number % 400)} for number in range(20_000)]
    batches = [
        pa.RecordBatch.from_pylist(rows[:1]),
        pa.RecordBatch.from_pylist(rows[1:]),
        pa.RecordBatch.from_pylist(rows[:0], schema=pa.schema({"k": pa.string(), "v": pa.string()})),
    ]
    parts = list(change_sets(batches, slot=300, epoch=2**40, size_bytes=1 << 20))
    assert len(parts) == 3
    assert sum(count for _, count in parts) == len(rows)
    found = []
    for changes, _ in parts:
        columns = decode_columns(encode_change_set(changes), "x")
        assert epoch_of(columns, "x") == 2**40
        found += [row for batch in record_batches(columns, "x") for row in batch.to_pylist()]
    assert found == rows


def test_one_large_row_is_a_part_of_its_own() -> None:
    """A row cannot be divided."""
    batch = pa.record_batch({"v": ["x" * (3 << 20), "y" * (3 << 20)]})
    parts = list(change_sets([batch], slot=0, epoch=1, size_bytes=1 << 20))
    assert [count for _, count in parts] == [1, 1]


@pytest.mark.parametrize("changes", [{b"\0\0": b"x"}, {b"\0" * 14: b"no arrow"}, {b"\0" * 14: None}])
def test_damaged_output_is_an_error(changes: dict[bytes, bytes | None]) -> None:
    """I10: an error with the object's name, never another record."""
    columns = decode_columns(encode_change_set(changes), "x")
    with pytest.raises(CorruptDataError, match="output in the-object cannot be read"):
        epoch_of(columns, "the-object")
        list(record_batches(columns, "the-object"))


def test_rows_elsewhere_in_memory_are_damage() -> None:
    """C30: rows whose values lie outside of their batch are damage; texts that are no UTF-8 are not, at any depth."""
    texts = pa.array([b"\xff\xfe", b"text"]).view(pa.string())
    offsets = pa.array([0, 1, 2], pa.int32())
    columns = [
        texts,
        pa.array([1.5, None]),
        pa.MapArray.from_arrays(offsets, pa.array(["k", "l"]), pa.StructArray.from_arrays([texts], ["text"])),
        pa.ListArray.from_arrays(offsets, texts),
        pa.LargeListArray.from_arrays(offsets.cast(pa.int64()), texts.cast(pa.large_string())),
    ]
    batch = pa.RecordBatch.from_arrays(columns, [*"abcde"])
    ((changes, _),) = change_sets([batch], slot=0, epoch=1, size_bytes=1 << 20)
    assert [*record_batches(decode_columns(encode_change_set(changes), "x"), "x")] == [batch]

    ((key, value),) = changes.items()
    at = bytes(value or b"").index(struct.pack("<3i", 0, 2, 6))
    hostile = (value or b"")[:at] + struct.pack("<3i", 0, 100_000, 6) + (value or b"")[at + 12 :]
    with pytest.raises(CorruptDataError, match="out of bounds"):
        list(record_batches(decode_columns(encode_change_set({key: hostile}), "x"), "x"))
