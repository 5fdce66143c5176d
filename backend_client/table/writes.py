"""Writes changes to RocksDB in bounded writes; a table between two versions has none."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from rocksdict import Rdict, WriteBatch, WriteOptions

from backend_client.table.journal import memory_bytes
from backend_client.table.snapshot import VERSION_KEY
from storage.change_set import ChangeColumns

# One write to RocksDB: large enough to be efficient, small compared with its write buffer; bounds Python objects, too.
_WRITE_BYTES = 4 << 20
_COPIED_BYTES = 256 << 10  # for entries that come one by one: they are still in the processor's cache
_OPTIONS = WriteOptions()
_OPTIONS.disable_wal = True  # type: ignore[method-assign, assignment]  # its stubs are wrong


def write(table: Rdict, parts: Iterable[ChangeColumns], version: str) -> int:
    """
    Write changes, later parts over earlier ones, and the new version; return the number of changes.

    If they need more than one write, the version is withdrawn before the first one.
    """
    batch, count, withdrawn = WriteBatch(raw_mode=True), 0, False
    for piece in chain.from_iterable(map(_pieces, parts)):
        for key, value in piece.pairs():
            if value is None:
                batch.delete(key)
            else:
                batch.put(key, value)
        count += len(piece.keys)
        if batch.size_in_bytes() >= _WRITE_BYTES:
            if not withdrawn:
                # From the first of several writes on, the table is between two versions.
                table.put(VERSION_KEY, b"", write_opt=_OPTIONS)
                withdrawn = True
            table.write(batch, _OPTIONS)
            batch = WriteBatch(raw_mode=True)
    batch.put(VERSION_KEY, version.encode())
    table.write(batch, _OPTIONS)
    return count


def write_entries(table: Rdict, entries: Iterable[tuple[bytes, bytes]]) -> None:
    """Write entries to a table that has no version, and gets none."""
    batch = WriteBatch(raw_mode=True)
    for key, value in entries:
        batch.put(key, value)
        if batch.size_in_bytes() >= _COPIED_BYTES:
            table.write(batch, _OPTIONS)
            batch = WriteBatch(raw_mode=True)
    table.write(batch, _OPTIONS)


def _pieces(part: ChangeColumns) -> Iterable[ChangeColumns]:
    return (part,) if memory_bytes(part) <= _WRITE_BYTES else part.pieces(_WRITE_BYTES)
