"""
Separates keys whose rows are interleaved.

Spark sorts a partition by one number per key (`key_groups.order_expression`), so that it never compares keys or reads
rows. Keys with the same number have their rows interleaved: two keys of a key group collide with probability 2^-48,
except for some that differ only in the places of their nulls. This module separates them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backend_client.columnar.keys import KeyColumns
from backend_client.key_group_sql import HASH_BITS
from backend_client.key_runs import key_changes
from backend_client.spark.task.rows import to_python
from backend_client.state.codec import KeyCodec

_KEY_GROUP_FIELD = pa.field("__dstl_key_group", pa.int32())

Orders = npt.NDArray[np.int64]
Encode = Callable[[Sequence[pa.Array]], list[bytes]]
"""Returns the bytes of the keys in these columns; equal keys have equal bytes."""


def key_encoding(key_schema: str, columns: pa.Schema | None) -> Encode:
    """
    Return the encoding of an operator's keys.

    Args:
        key_schema: The struct of the key columns, as Spark's JSON text.
        columns: The key columns of a columnar operator, which takes values that Python lacks; None for others.
    """
    encode = KeyCodec(key_schema).encode

    def of_values(rows: Sequence[pa.Array]) -> list[bytes]:
        return list(map(encode, zip(*map(to_python, rows), strict=True)))

    if columns is None:
        return of_values
    keys_of = KeyColumns(key_schema, columns).keys_of

    def of_any(rows: Sequence[pa.Array]) -> list[bytes]:
        try:
            return of_values(rows)  # most calls are for one key, which this encodes a hundred times as fast
        except (ValueError, ArithmeticError, LookupError):  # of text, years and time zones that Python lacks
            return keys_of(rows)  # the same bytes

    return of_any


def with_keys(batches: Iterable[pa.RecordBatch], places: Sequence[int | None]) -> Iterator[pa.RecordBatch]:
    """
    Yield batches with all key columns after the order number; those that are also row columns appear twice.

    Args:
        batches: Columns: the order number, the key columns that are not row columns, the row columns.
        places: For each key column its position among the row columns, or None.
    """
    added = places.count(None)
    for batch in batches:
        columns, names = batch.columns, batch.schema.names
        own = iter(range(1, 1 + added))
        keys = [next(own) if place is None else 1 + added + place for place in places]
        order = [0, *keys, *range(1 + added, len(columns))]
        yield pa.RecordBatch.from_arrays([columns[at] for at in order], [names[at] for at in order])


def with_key_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield batches with the rows' key groups in place of their order numbers."""
    for batch in batches:
        groups = (_orders(batch) >> HASH_BITS).astype(np.int32)
        yield batch.set_column(0, _KEY_GROUP_FIELD, pa.array(groups))


class KeySeparator:
    """
    Sorted batches in which each key's rows are adjacent and keep their order; may yield more batches than it was given.

    Among keys that share a number, the first key's rows stream through, however many there are; the rows of the others
    are held in memory until the number changes.

    Args:
        batches: Columns: the order number, `key_count` key columns, any others; sorted by the number.
        key_count: Number of key columns.
        encode: Encodes keys.
    """

    def __init__(self, batches: Iterable[pa.RecordBatch], key_count: int, encode: Encode) -> None:
        self._batches = batches
        self._key_count = key_count
        self._encode = encode
        self._order = -1
        self._key = b""
        """The first key of the last batch's last number."""
        self._held: list[pa.RecordBatch] = []

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            if not batch.num_rows:
                continue
            orders = _orders(batch)
            begins_alike = orders[0] == self._order
            if self._held or (begins_alike and self._first_key(batch) != self._key) or self._is_mixed(batch, orders):
                yield from self._put_apart(batch, orders)
            else:
                yield batch
                if not begins_alike or orders[-1] != self._order:
                    self._order, self._key = int(orders[-1]), self._first_key(batch.slice(batch.num_rows - 1))
        yield from self._released()

    def _put_apart(self, batch: pa.RecordBatch, orders: Orders) -> Iterator[pa.RecordBatch]:
        goes_on = int(np.searchsorted(orders, self._order, side="right"))
        if goes_on:
            yield from self._first_of_number(batch.slice(0, goes_on))
        if goes_on == batch.num_rows:
            return
        yield from self._released()
        last = int(np.searchsorted(orders, orders[-1], side="left"))
        if last > goes_on:
            yield self._sorted(batch.slice(goes_on, last - goes_on))
        self._order, self._key = int(orders[-1]), self._first_key(batch.slice(last))
        yield from self._first_of_number(batch.slice(last))

    def _first_of_number(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield the rows of their number's first key; hold the others."""
        keys = self._encode(self._key_columns(batch))
        is_first = np.fromiter((key == self._key for key in keys), np.bool_, batch.num_rows)
        if is_first.any():
            yield batch.filter(pa.array(is_first))
        if not is_first.all():
            self._held.append(batch.filter(pa.array(~is_first)))

    def _released(self) -> Iterator[pa.RecordBatch]:
        if self._held:
            held, self._held = pa.Table.from_batches(self._held).combine_chunks().to_batches(), []
            yield from map(self._sorted, held)

    def _sorted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the batch with each key's rows adjacent; keys of one number keep the order of their first rows."""
        first: dict[tuple[int, bytes], int] = {}
        pairs = zip(_orders(batch).tolist(), self._encode(self._key_columns(batch)), strict=True)
        places = np.fromiter((first.setdefault(pair, row) for row, pair in enumerate(pairs)), np.int64, batch.num_rows)
        return batch.take(pa.array(np.argsort(places, kind="stable")))

    def _is_mixed(self, batch: pa.RecordBatch, orders: Orders) -> bool:
        alike = orders[1:] == orders[:-1]
        return bool(alike.any() and (alike & key_changes(self._key_columns(batch))).any())

    def _first_key(self, batch: pa.RecordBatch) -> bytes:
        return self._encode(self._key_columns(batch.slice(0, 1)))[0]

    def _key_columns(self, batch: pa.RecordBatch) -> list[pa.Array]:
        return list(batch.columns[1 : 1 + self._key_count])


def _orders(batch: pa.RecordBatch) -> Orders:
    orders: Orders = batch.column(0).to_numpy()
    return orders
