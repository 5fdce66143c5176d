"""
Publishes Parquet files into a folder of an object store or a mounted disk, one per slot and checkpoint.

A file appears whole or not at all, so whoever lists the folder sees committed records only. The marker is in the file's
own metadata, and the files of a slot are numbered: each is put only if its number is not taken. That is the whole
commit. A publisher that was paused finds its number taken, and is fenced.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from backend_client.sinks.protocol import Marker, Sink, Slot, SlotPublisher
from storage.errors import (
    ConflictError,
    CorruptDataError,
    DstlError,
    FencedError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from storage.object_store import ObjectStore
from storage.open import open_store

_MARKER = b"dstl.marker"
_SUFFIX = ".parquet"
_TAIL_BYTES = 64 << 10
_FOOTER = struct.Struct("<I4s")
_MAGIC = b"PAR1"


@dataclass(frozen=True, slots=True)
class ParquetSink(Sink):
    """
    A folder of Parquet files, for one sink of one job.

    Files are named ``<sink>-<job uid>-<slot>-<number>.parquet``: a later job of the same name has files of its own. A
    checkpoint without records makes none.

    Args:
        path: ``s3://bucket/folder`` or ``file:///folder``; the executors' environment has the credentials.
        compression: Of the files, as `pyarrow.parquet.write_table` takes it.
        store_options: Options of the store, for example `endpoint_url`.
    """

    path: str
    compression: str = "zstd"
    store_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def check(self, columns: pa.Schema, slots: Sequence[Slot]) -> None:
        """Check that the folder can be written, and the columns stored."""
        try:
            _encoded([], columns, "", self.compression)
        except (pa.ArrowException, ValueError, TypeError, OSError) as error:
            raise InvalidInputError(f"the result cannot be stored as Parquet: {error}") from error
        store = self._store()
        try:
            store.check_writable()
        except DstlError as error:
            raise UnavailableError(f"the sink's folder {self.path} cannot be written: {error}") from error
        finally:
            store.close()

    def open(self, slot: Slot) -> SlotPublisher:
        """Open a slot. Of several publishers the first one to put the next file wins; the others are fenced."""
        return _ParquetPublisher(self._store(), slot, self.compression)

    def _store(self) -> ObjectStore:
        return open_store(self.path, **self.store_options)


class _ParquetPublisher(SlotPublisher):
    def __init__(self, store: ObjectStore, slot: Slot, compression: str) -> None:
        self._store = store
        self._slot = slot
        self._compression = compression
        name = f"{slot.sink}-{slot.job_uid}-{slot.number:05d}"
        self._prefix, self._hint = f"{name}-", f"_dstl/{name}"
        self._last = self._newest(self._hinted())
        self._marker = None if self._last is None else _marker(store, self._key(self._last))

    def last_published(self) -> Marker | None:
        """Return the marker in the newest file."""
        return self._marker

    def publish(self, records: Iterable[pa.RecordBatch], marker: Marker) -> int:
        """Put the next file; without records only if the marker is the first one of a branch, or of the slot."""
        batches = list(records)
        count = sum(int(batch.num_rows) for batch in batches)
        is_on_branch = self._marker is not None and self._marker.checkpoint.branch == marker.checkpoint.branch
        if count == 0 and is_on_branch:
            return 0  # the next marker says the same and more
        schema = batches[0].schema if batches else self._slot.columns
        if schema is None:
            raise InvalidInputError("a slot without columns cannot be published to without records")
        number = 0 if self._last is None else self._last + 1
        data = _encoded(batches, schema, marker.to_text(), self._compression)
        try:
            self._store.put(self._key(number), data, if_absent=True)
        except ConflictError as error:
            raise FencedError(
                f"slot {self._slot.number} of sink {self._slot.sink!r} was published by another publisher"
            ) from error
        self._last, self._marker = number, marker
        with suppress(DstlError):  # saves requests only
            self._store.put(self._hint, b"%d" % number)
        return count

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number:012d}{_SUFFIX}"

    def _hinted(self) -> int:
        """Return the number of a file that may be the newest; -1 if nothing is known."""
        with suppress(NotFoundError, ValueError):
            return int(self._store.get(self._hint))
        return -1

    def _newest(self, hint: int) -> int | None:
        """Return the number of the newest file; a listing may be old, so the next one is always looked for."""
        listed = [self._number(info.key) for info in self._store.list(self._prefix, start_after=self._key(hint - 1))]
        if not listed and hint > 0:  # the folder was emptied, or the hint is another folder's
            listed = [self._number(info.key) for info in self._store.list(self._prefix)]
        newest = max((number for number in listed if number is not None), default=-1)
        while True:
            try:
                self._store.head(self._key(newest + 1))
            except NotFoundError:
                return newest if newest >= 0 else None
            newest += 1

    def _number(self, key: str) -> int | None:
        text = key.removeprefix(self._prefix).removesuffix(_SUFFIX)
        return int(text) if text.isdigit() else None


def _encoded(batches: Sequence[pa.RecordBatch], schema: pa.Schema, marker: str, compression: str) -> bytes:
    """Return a file's bytes: the same for the same batches and marker."""
    schema = schema.with_metadata({**(schema.metadata or {}), _MARKER: marker.encode()})
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, compression=compression) as writer:
        for batch in batches:
            writer.write_batch(batch.cast(schema))
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _marker(store: ObjectStore, key: str) -> Marker:
    """Read the marker from the end of a file."""
    size_bytes = store.head(key).size_bytes
    tail = store.get_range(key, max(0, size_bytes - _TAIL_BYTES), min(size_bytes, _TAIL_BYTES))
    length, magic = _FOOTER.unpack(tail[-_FOOTER.size :])
    if magic != _MAGIC:
        raise CorruptDataError(f"file {key} is not a Parquet file; only the sink may write there", object_key=key)
    if length + _FOOTER.size > len(tail):
        tail = store.get_range(key, size_bytes - length - _FOOTER.size, length + _FOOTER.size)
    try:
        footer = pq.read_metadata(pa.BufferReader(_MAGIC + tail[-(length + _FOOTER.size) :]))
        return Marker.parse((footer.metadata or {})[_MARKER].decode())
    except (pa.ArrowException, KeyError, InvalidInputError, ValueError) as error:
        raise CorruptDataError(f"file {key} has no marker: {error}", object_key=key) from error
