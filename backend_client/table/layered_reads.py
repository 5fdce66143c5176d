"""Reads of a table overlaid with its journal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice, takewhile

import numpy as np
import pyarrow as pa
from rocksdict import Rdict

from backend_client.table.files import entries_between, entries_from
from backend_client.table.journal import MISSING, TableJournal

# A look-up takes as long as a scan of about this many entries.
_SCANNED_PER_KEY = 8
_SCANNED_AT_ONCE = 4096


def reader(table: Rdict, journal: TableJournal) -> Callable[[bytes], bytes | None]:
    """Return the function that reads one key: the table's own, if the journal has no changes."""
    stored, layers = table.get, journal.layers()
    if not layers:
        return stored

    def read(key: bytes) -> bytes | None:
        for layer in layers:
            value = layer.get(key, MISSING)
            if value is not MISSING:
                return value  # type: ignore[no-any-return]
        return stored(key)

    return read


def scan(table: Rdict, journal: TableJournal, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys that begin with `prefix`, with their values, in key order."""
    stored = takewhile(lambda entry: entry[0][: len(prefix)] == prefix, entries_from(table, prefix))
    if not len(journal):
        return stored
    return journal.over(stored, prefix, _behind(prefix))


def between(
    table: Rdict, journal: TableJournal, ranges: Iterable[tuple[bytes, bytes]]
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the entries of ranges of keys, each from the first one to the second one, exclusive, in key order."""
    position = table.iter()  # to make one for each range would take longer than to read a short one
    for low, high in ranges:
        yield from journal.over(entries_between(position, low, high), low, high)


def read_many(table: Rdict, journal: TableJournal, keys: pa.Array, covered: float) -> pa.Array:
    """Return the values of many keys, null where there is none; see `StateTable.get_many`."""
    if not len(journal):
        return pa.array(_stored_many(table, keys.to_pylist(), covered), pa.binary())
    values, found = journal.find_many(keys)
    if found.all():
        return values
    stored = _stored_many(table, keys.filter(pa.array(~found)).to_pylist(), covered)
    rows = np.arange(len(keys))
    rows[~found] = len(keys) + np.arange(len(stored))
    return pa.concat_arrays([values, pa.array(stored, pa.binary())]).take(pa.array(rows))


def _stored_many(table: Rdict, keys: list[bytes], covered: float) -> list[bytes | None]:
    entries = table.property_int_value("rocksdb.estimate-num-keys") or 0
    if entries * covered > _SCANNED_PER_KEY * len(keys):
        values: list[bytes | None] = table.get(keys)  # type: ignore[arg-type, assignment]  # raw mode
        return values
    found: dict[bytes, bytes] = {}
    last, left = max(keys), entries_from(table, min(keys))
    while block := list(islice(left, _SCANNED_AT_ONCE)):
        found.update(block)
        if block[-1][0] >= last:
            break
    return list(map(found.get, keys))


def _behind(prefix: bytes) -> bytes | None:
    """Return the least key after all keys with `prefix`; None if there is none."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes([head[-1] + 1]) if head else None
