"""The index of a materialization, and the objects that it names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dstl_service.formats.materialization_index import (
    SnapshotFile,
    decode_index,
    encode_index,
    is_table_file,
    read_index,
)
from dstl_service.registry.named_objects import KnownIndexes
from dstl_service.wire import CheckpointRef
from storage.errors import CorruptDataError, InvalidInputError
from storage.memory_store import MemoryStore
from tests.unit.dstl_service.snapshots import index_of, store_snapshot

VERSION = CheckpointRef(7, 0, "u")


def test_index_reads_as_written() -> None:
    """An index survives encoding and decoding, including parents and files."""
    index = index_of(VERSION, parents=("before",))

    assert decode_index(encode_index(index), "key") == index


def test_any_damage_is_an_error() -> None:
    """I10: a flipped bit anywhere, or a missing end, is an error that names the object."""
    data = encode_index(index_of(VERSION))
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(CorruptDataError, match=r"some/key"):
            decode_index(bytes(damaged), "some/key")
    with pytest.raises(CorruptDataError, match=r"some/key"):
        decode_index(data[:-1], "some/key")


@pytest.mark.parametrize(
    "name", ["../x.sst", "x.sst", "12345.sst", "CURRENT/..", "OPTIONS-000005", "LOG", "", "CURRENT\n"]
)
def test_strange_file_names_are_refused(name: str) -> None:
    """I15: only names of a table's files are accepted, so none leads out of a folder."""
    assert not is_table_file(name)
    with pytest.raises(InvalidInputError):
        SnapshotFile(name, "key", 1, "0" * 32)


def test_index_of_another_snapshot_is_refused() -> None:
    """I10: a handle that differs from the index in any way is an error."""
    store = MemoryStore()
    handle = store_snapshot(store, index_of(VERSION))
    assert read_index(store, handle) == index_of(VERSION)

    for other in (replace(handle, checkpoint_id=8), replace(handle, size_bytes=1), replace(handle, operator="x")):
        with pytest.raises(CorruptDataError, match=handle.index_key):
            read_index(store, other)


def test_all_objects_are_named() -> None:
    """I11: a materialization names its index and each of its files."""
    store = MemoryStore()
    handle = store_snapshot(store, index_of(VERSION))

    assert KnownIndexes(store).object_keys_of([handle]) == {info.key for info in store.list("job/materialized/")}


def test_unreadable_index_names_nobody_knows_what() -> None:
    """I11: where an index is damaged or missing, the collector gets an error instead of a short list."""
    store = MemoryStore()
    handle = store_snapshot(store, index_of(VERSION))
    store.put(handle.index_key, b"{}")
    with pytest.raises(CorruptDataError):
        KnownIndexes(store).object_keys_of([handle])
    store.delete([handle.index_key])
    with pytest.raises(CorruptDataError):
        KnownIndexes(store).object_keys_of([handle])
