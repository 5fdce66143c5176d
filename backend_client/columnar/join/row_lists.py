"""
Lists of rows as binary values: the rows of many lists are packed, and unpacked, at once. No I/O.

A list is its rows one after the other. A row is the size of its bytes (4 bytes), its time (8 bytes), both
little-endian, and its bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backend_client.columnar.packing import joined, of_equal_width
from backend_client.columnar.values import Ints, binary_array, valid, value_bytes, value_sizes
from storage.errors import CorruptDataError

_HEAD = np.dtype([("size", "<u4"), ("time", "<i8")])


class ListedRows(NamedTuple):
    """Rows of several lists: the number of each row's list, ascending; its time; its bytes."""

    lists: Ints
    times: Ints
    values: pa.Array


def pack_lists(rows: ListedRows, count: int) -> pa.Array:
    """Return `count` lists, null for one without rows."""
    heads = np.zeros(len(rows.lists), _HEAD)
    heads["size"], heads["time"] = value_sizes(rows.values), rows.times
    packed = joined(of_equal_width(heads.view(np.uint8).reshape(-1, _HEAD.itemsize)), rows.values)
    sizes = np.bincount(rows.lists, value_sizes(packed), minlength=count).astype(np.int64)
    return binary_array(value_bytes(packed), sizes, sizes == 0)


def unpack_lists(lists: pa.Array) -> ListedRows:
    """
    Return the rows of lists; a null has none.

    Raises:
        CorruptDataError: A list is not a sequence of rows.
    """
    present = np.flatnonzero(valid(lists))
    stored = lists.drop_null()
    data, sizes = value_bytes(stored), value_sizes(stored)
    ends = np.cumsum(sizes)
    begins, of = _begins(data, ends - sizes, ends)
    order = np.argsort(begins, kind="stable")
    begins, of = begins[order], of[order]
    heads = _heads(data, begins)
    is_value = np.ones(len(data), np.bool_)
    is_value[begins[:, None] + np.arange(_HEAD.itemsize)] = False
    return ListedRows(present[of], heads["time"], binary_array(data[is_value], heads["size"].astype(np.int64)))


def _begins(data: npt.NDArray[np.uint8], at: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Return where rows begin and their lists' numbers: first the first rows of all lists, then the second ones."""
    of = np.arange(len(at))
    found: list[tuple[Ints, Ints]] = [(at[:0], of[:0])]
    while len(at):
        if (at + _HEAD.itemsize > ends).any():
            raise CorruptDataError("a stored list of rows ends within the head of a row")
        found.append((at, of))
        at = at + _HEAD.itemsize + _heads(data, at)["size"].astype(np.int64)
        if (at > ends).any():
            raise CorruptDataError("a stored list of rows ends within a row")
        left = at < ends
        at, of, ends = at[left], of[left], ends[left]
    begins, lists = zip(*found, strict=True)
    return np.concatenate(begins), np.concatenate(lists)


def _heads(data: npt.NDArray[np.uint8], at: Ints) -> npt.NDArray[np.void]:
    heads: npt.NDArray[np.void] = data[at[:, None] + np.arange(_HEAD.itemsize)].reshape(-1).view(_HEAD)
    return heads
