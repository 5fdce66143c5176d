"""
Keys whose rows come mixed.

Spark sorts a partition by one number of each key (`key_groups.order_expression`), for which it never compares two keys
nor looks at a row. Keys with the same number - a pair of keys of a key group has it once in 2^48, except for some that
are alike but for where their nulls are - have their rows mixed then. Here they are put apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backend_client.key_groups import HASH_BITS
from backend_client.key_runs import key_changes
from backend_client.spark.task.rows import to_python

_KEY_GROUP_FIELD = pa.field("__dstl_key_group", pa.int32())

Orders = npt.NDArray[np.int64]


def with_keys(batches: Iterable[pa.RecordBatch], places: Sequence[int | None]) -> Iterator[pa.RecordBatch]:
    """
    Yield batches with all columns of the key behind the number: those that are columns of the rows are there twice.

    Args:
        batches: Columns: the number, the key columns that are not the rows', those of the rows.
        places: For each key column the number of the rows' column that it is, or None.
    """
    added = places.count(None)
    for batch in batches:
        columns, names = batch.columns, batch.schema.names
        own = iter(range(1, 1 + added))
        keys = [next(own) if place is None else 1 + added + place for place in places]
        order = [0, *keys, *range(1 + added, len(columns))]
        yield pa.RecordBatch.from_arrays([columns[at] for at in order], [names[at] for at in order])


def with_key_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield batches with the rows' key groups in place of the numbers by which they were sorted."""
    for batch in batches:
        groups = (_orders(batch) >> HASH_BITS).astype(np.int32)
        yield batch.set_column(0, _KEY_GROUP_FIELD, pa.array(groups))


class KeySeparator:
    """
    Sorted batches in which the rows of a key are together, as many or more than were given, in their order.

    Of keys that share a number, the one that comes first goes on as it comes, however many rows it has; those of the
    others are held in memory until the number changes.

    Args:
        batches: Columns: the number, `key_count` key columns, any others; by ascending numbers.
        key_count: How many columns are the key.
        encode: Returns a key's bytes.
    """

    def __init__(
        self, batches: Iterable[pa.RecordBatch], key_count: int, encode: Callable[[tuple[Any, ...]], bytes]
    ) -> None:
        self._batches = batches
        self._key_count = key_count
        self._encode = encode
        self._order = -1
        self._key = b""
        """The first key of the number with which the last batch ended."""
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
        """Yield the rows of the first key of their number; hold the others."""
        is_first = np.fromiter((key == self._key for key in self._keys(batch)), np.bool_, batch.num_rows)
        if is_first.any():
            yield batch.filter(pa.array(is_first))
        if not is_first.all():
            self._held.append(batch.filter(pa.array(~is_first)))

    def _released(self) -> Iterator[pa.RecordBatch]:
        if self._held:
            held, self._held = pa.Table.from_batches(self._held).combine_chunks().to_batches(), []
            yield from map(self._sorted, held)

    def _sorted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of each key together, the keys of a number in the order in which they come."""
        first: dict[tuple[int, bytes], int] = {}
        pairs = zip(_orders(batch).tolist(), self._keys(batch), strict=True)
        places = np.fromiter((first.setdefault(pair, row) for row, pair in enumerate(pairs)), np.int64, batch.num_rows)
        return batch.take(pa.array(np.argsort(places, kind="stable")))

    def _is_mixed(self, batch: pa.RecordBatch, orders: Orders) -> bool:
        alike = orders[1:] == orders[:-1]
        return bool(alike.any() and (alike & key_changes(self._key_columns(batch))).any())

    def _keys(self, batch: pa.RecordBatch) -> Iterator[bytes]:
        return map(self._encode, zip(*map(to_python, self._key_columns(batch)), strict=True))

    def _first_key(self, batch: pa.RecordBatch) -> bytes:
        return next(self._keys(batch.slice(0, 1)))

    def _key_columns(self, batch: pa.RecordBatch) -> list[pa.Array]:
        columns: list[pa.Array] = batch.columns[1 : 1 + self._key_count]
        return columns


def _orders(batch: pa.RecordBatch) -> Orders:
    orders: Orders = batch.column(0).to_numpy()
    return orders
