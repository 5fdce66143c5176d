"""The bytes of a change set."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest

from storage import change_set
from storage.change_set import (
    ChangeColumns,
    decode_change_set,
    decode_columns,
    encode_change_set,
    in_columns,
    merge_change_sets,
)
from storage.errors import CorruptDataError, OverloadedError
from storage.key_groups import KeyGroupRange

CHANGES = {b"b": b"value", b"a": None, b"c": b""}


def test_changes_come_back_sorted() -> None:
    """Changes are read back in key order; a deletion differs from an empty value."""
    assert list(decode_change_set(encode_change_set(CHANGES), "o")) == [(b"a", None), (b"b", b"value"), (b"c", b"")]


def test_same_changes_have_same_bytes() -> None:
    """I8: the bytes depend on the changes only, not on their order of arrival."""
    assert encode_change_set(CHANGES) == encode_change_set(dict(reversed(CHANGES.items())))


def test_long_changes_are_compressed() -> None:
    """Repeated content is compressed."""
    assert len(encode_change_set({number.to_bytes(4, "big"): b"same" * 50 for number in range(1000)})) < 50_000


@pytest.mark.parametrize("payload", [b"", b"nonsense", encode_change_set(CHANGES)[:-100], b"\xff" * 64])
def test_other_bytes_are_reported(payload: bytes) -> None:
    """I10: for bytes that are not a change set, the error names the object."""
    with pytest.raises(CorruptDataError, match=r"7\.seg"):
        list(decode_change_set(payload, "7.seg"))


def test_other_columns_are_reported() -> None:
    """An Arrow stream with other columns is not a change set."""
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"key": pa.array([1])})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)

    with pytest.raises(CorruptDataError, match="columns"):
        decode_change_set(sink.getvalue().to_pybytes(), "o")


def test_neighbours_with_long_values_are_put_apart() -> None:
    """A few long values among many short ones make no piece that no service takes in, wherever they are."""
    short: dict[bytes, bytes | None] = {b"\0\0%05d" % number: None for number in range(10_000)}
    changes = ChangeColumns.of({**short, **{b"\0\1hot-%02d" % number: b"x" * 1000 for number in range(40)}})
    pieces = list(changes.pieces(4_000))
    assert [pair for piece in pieces for pair in piece.pairs()] == list(changes.pairs())
    sizes = [sum(len(key) + len(value or b"") for key, value in piece.pairs()) for piece in pieces]
    assert max(sizes) < 4_000 + 1_010
    assert len(pieces) < 2 + sum(sizes) // 4_000
    assert list(ChangeColumns.of({}).pieces(1)) == []


def test_long_values_are_put_into_columns_in_parts() -> None:
    """Changes of any number and length are divided into columns of a few megabytes, in order; the last one counts."""
    changes = [(b"%05d" % (number % 900), bytes([number % 251]) * 50_000) for number in range(1000)]
    parts = list(in_columns([*changes, (b"00000", None)]))

    assert all(part.values.nbytes < 21 << 20 for part in parts)
    assert dict(pair for part in parts for pair in part.pairs()) == {**dict(changes), b"00000": None}
    assert [len(part.keys) for part in in_columns((b"%06d" % number, b"") for number in range(120_000))] == [
        50_048,
        50_048,
        19_904,
    ]


def _with_offsets(*offsets: int) -> bytes:
    """Return a change set of three keys whose values lie where its writer says; the second key is deleted."""
    payload = change_set._encoded(ChangeColumns.of({b"\0\0a": b"12345678", b"\0\0b": None, b"\0\0c": b"9"}), None)
    at = payload.rindex(struct.pack("<4i", 0, 8, 8, 9))
    return payload[:at] + struct.pack("<4i", *offsets) + payload[at + 16 :]


@pytest.mark.parametrize(
    "offsets",
    [(0, 100_000, 8, 9), (-9, 8, 8, 9), (0, 8, -9, 9), (0, 8, 8, 100_000), (0, 8, 8, 2**31 - 1), (9, 8, 8, 0)],
)
def test_values_elsewhere_in_memory_are_damage(offsets: tuple[int, ...]) -> None:
    """C30: a change set whose offsets lead out of its bytes is damage: it would get other memory of its reader."""
    hostile = _with_offsets(*offsets)

    with pytest.raises(CorruptDataError, match="hostile cannot be read"):
        decode_columns(hostile, "hostile")
    with pytest.raises(CorruptDataError, match="hostile cannot be read"):
        list(
            merge_change_sets(
                [(hostile, "hostile", [KeyGroupRange(0, 0)])],
                keep_deleted=False,
                size_bytes_max=1 << 20,
                decoded_bytes_max=1 << 20,
            )
        )
    assert list(decode_change_set(_with_offsets(0, 8, 8, 9), "own")) == [
        (b"\0\0a", b"12345678"),
        (b"\0\0b", None),
        (b"\0\0c", b"9"),
    ]


def test_null_keys_are_damage() -> None:
    """A key that is null sorts nowhere, so it is damage, also where a change set hides its number of nulls."""
    keys = pa.array([b"\0\0a", None], pa.binary())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, change_set.SCHEMA) as writer:
        writer.write_batch(pa.record_batch([keys, keys], schema=change_set.SCHEMA))

    with pytest.raises(CorruptDataError, match="a key is null"):
        decode_columns(sink.getvalue().to_pybytes(), "hostile")


class TestDecodedSize:
    """C7: the decoded size of a payload is known and bounded before anything is decoded."""

    def test_bomb_is_refused(self) -> None:
        """A few kilobytes that claim to decode to 128 MiB are refused."""
        bomb = change_set._encoded(ChangeColumns.of({b"\0\0k": bytes(128 << 20)}), "zstd")
        assert len(bomb) < 10_000

        with pytest.raises(CorruptDataError, match="would become"):
            decode_columns(bomb, "bomb")

    def test_claimed_size_is_not_believed(self) -> None:
        """A buffer that claims to decode to a terabyte is refused, however small it is."""
        payload = bytearray(encode_change_set({b"\0\0key": b"value" * 100}))
        length = struct.pack("<q", 500)
        at = payload.rindex(length)
        payload[at : at + 8] = struct.pack("<q", 1 << 40)

        with pytest.raises(CorruptDataError, match="would become"):
            decode_columns(bytes(payload), "claim")

    @pytest.mark.parametrize("form", [{"use_legacy_format": True}, {"metadata_version": pa.ipc.MetadataVersion.V4}])
    def test_older_forms_of_arrow_are_refused(self, form: dict[str, Any]) -> None:
        """C31: Arrow reads older forms as well, in which its reader here finds no sizes: they are damage."""
        columns = ChangeColumns.of({b"\0\0k": bytes(128 << 20)})
        sink, options = pa.BufferOutputStream(), pa.ipc.IpcWriteOptions(compression="zstd", **form)
        with pa.ipc.new_stream(sink, change_set.SCHEMA, options=options) as writer:
            writer.write_batch(pa.record_batch(list(columns), schema=change_set.SCHEMA))
        del columns
        held_bytes = pa.default_memory_pool().bytes_allocated()

        with pytest.raises(CorruptDataError, match="present form"):
            decode_columns(sink.getvalue().to_pybytes(), "old")
        assert pa.default_memory_pool().bytes_allocated() <= held_bytes

    def test_merge_of_more_than_fits_is_refused_before_it_is_decoded(self) -> None:
        """Change sets that are acceptable individually may together not exceed the limit of a merge."""
        payloads = [encode_change_set({b"\0\0%d" % number: bytes(1 << 20)}) for number in range(3)]
        sets = [(payload, f"{number}.seg", [KeyGroupRange(0, 0)]) for number, payload in enumerate(payloads)]
        assert sum(map(len, payloads)) < 10_000

        with pytest.raises(OverloadedError, match="uncompressed"):
            list(merge_change_sets(sets, keep_deleted=True, size_bytes_max=1 << 20, decoded_bytes_max=5 << 19))

    @pytest.mark.parametrize(("rows_of_batches", "takes_bytes"), [((1_000,), 50_000), ((0,) * 100, 70_000)])
    def test_rows_and_batches_count_in_a_merge(self, rows_of_batches: tuple[int, ...], takes_bytes: int) -> None:
        """C38: small changes, and batches without any, take many times their bytes when they are merged."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, change_set.SCHEMA) as writer:
            for rows in rows_of_batches:
                keys = pa.array([b"\0\0%d" % row for row in range(rows)], pa.binary())
                writer.write_batch(pa.record_batch([keys, pa.nulls(rows, pa.binary())], schema=change_set.SCHEMA))
        sets = [(sink.getvalue().to_pybytes(), "small", [KeyGroupRange(0, 0)])]
        assert len(sets[0][0]) < takes_bytes / 2

        with pytest.raises(OverloadedError, match="uncompressed"):
            list(merge_change_sets(sets, keep_deleted=True, size_bytes_max=1 << 20, decoded_bytes_max=takes_bytes))

    def test_large_value_that_compresses_well_is_read_back(self) -> None:
        """A value that compresses better than a reader accepts is stored uncompressed."""
        value = bytes(80 << 20)

        assert dict(decode_change_set(encode_change_set({b"\0\0k": value}), "own")) == {b"\0\0k": value}

    @pytest.mark.parametrize("cut", range(0, 400, 7))
    def test_damaged_frames_are_damage(self, cut: int) -> None:
        """Damage anywhere in the frames of a payload is reported as damage, with the object's name."""
        payload = bytearray(encode_change_set({b"\0\0key": b"value" * 100}))
        payload[cut : cut + 4] = b"\xff\xff\xff\x7f"

        with suppress(CorruptDataError):
            decode_columns(bytes(payload), "damaged")
