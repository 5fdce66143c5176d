"""
Publishes Parquet files into a folder of an object store or a mounted disk, one per slot and checkpoint.

A file appears whole or not at all, so a listing of the folder shows committed records only. The marker is in the file's
own metadata, and the files of a slot are numbered: each is put only if its number is not taken. That is the whole
commit. A publisher that was paused finds its number taken, and is fenced.

Beside it, a slot's *entries* in a hidden folder repeat number and marker, so that published files can be deleted or
compacted. They are numbered, too: each is put only if its number is not taken, and the one with the highest number
counts. A publisher that was paused can therefore not set the marker back. The newest entry may be older than the newest
file, so the file of the next number is always looked for. A publish ends when an entry tells of its file: from then on
that may be deleted.
"""

from __future__ import annotations

import mmap
import struct
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from backend_client.sinks.option_values import check_text
from backend_client.sinks.parquet_entries import HIDDEN, LOOKS, Entries, Published
from backend_client.sinks.parquet_files import MARKER, Written, same_names, temporary, write, written_records
from backend_client.sinks.protocol import Marker, Sink, Slot, SlotPublisher
from storage.clock import SystemClock
from storage.errors import (
    ConflictError,
    CorruptDataError,
    DstlError,
    FencedError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from storage.leftovers import remove_leftovers
from storage.object_store import PROBE_FOLDER, ObjectStore
from storage.open import open_store

_SUFFIX = ".parquet"
_PROBES = f"{HIDDEN}/{PROBE_FOLDER}"
_LEFT_MS = 24 * 60 * 60 * 1000
"""Unfinished files that are older, by this host's clock, are of processes that were killed."""
_TAIL_BYTES = 64 << 10
_FOOTER = struct.Struct("<I4s")
_FOOTER_BYTES_MAX = 256 << 20
"""More than files of 5 GiB with thousands of columns have. Whoever may write to the folder may name any length."""
_MAGIC = b"PAR1"


@dataclass(frozen=True, slots=True)
class ParquetSink(Sink):
    """
    A folder of Parquet files, for one sink of one job.

    Files are named ``<sink>-<job uid>-<slot>-<number>.parquet``: a later job of the same name has files of its own. A
    checkpoint without records makes none.

    Args:
        path: ``s3://bucket/folder`` or ``file:///folder``; the executors' environment has the credentials.
        compression: The files' compression, as `pyarrow.parquet.write_table` takes it.
        store_options: Options of the store, for example `endpoint_url`.
    """

    path: str
    compression: str = "zstd"
    store_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def check(self, columns: pa.Schema, slots: Sequence[Slot]) -> None:
        """Check that the folder can be written, the columns stored, and the files seen."""
        check_text("path", self.path)
        check_text("compression", self.compression)
        _check_names(columns, slots)
        try:
            with tempfile.TemporaryFile() as file:
                write(file, [], columns, "", self.compression)
        except (pa.ArrowException, ValueError, TypeError, OSError) as error:
            raise InvalidInputError(f"the result cannot be stored as Parquet: {error}") from error
        with closing(open_store(self.path, **self.store_options)) as store:
            try:
                store.check_writable(_PROBES)
                next(iter(store.list(f"{_PROBES}/")), None)  # who opens a slot lists its entries
            except DstlError as error:
                raise UnavailableError(f"the sink's folder {self.path} cannot be written: {error}") from error
            # Of killed processes: files that were not whole yet, and probes. If that fails, they only stay.
            with suppress(DstlError):
                remove_leftovers(store, SystemClock(), _LEFT_MS, _PROBES)

    def open(self, slot: Slot) -> SlotPublisher:
        """Open a slot. The first of several publishers to put the next file wins; the others are fenced."""
        store = open_store(self.path, **self.store_options)
        try:
            return _ParquetPublisher(store, slot, self.compression)
        except BaseException:
            store.close()
            raise


class _ParquetPublisher(SlotPublisher):
    def __init__(self, store: ObjectStore, slot: Slot, compression: str) -> None:
        self._store = store
        self._slot = slot
        self._compression = compression
        name = f"{slot.sink}-{slot.job_uid}-{slot.number:05d}"
        self._prefix, self._entries = f"{name}-", Entries(store, name)
        self._last = self._newest()
        self._is_overtaken = False

    def last_published(self) -> Marker | None:
        """Return the marker that was there when the slot was opened, or that was published since."""
        return None if self._last is None else self._last.marker

    def publish(self, records: Iterable[pa.RecordBatch], marker: Marker) -> int:
        """
        Put the next file; without records only if the marker is the first one of a branch or slot, or passes over some.

        Output of checkpoints that it passes over may be given up; the file fences a paused publisher that still has it.
        """
        if self._is_overtaken:
            raise self._fenced()
        number = 0 if self._last is None else self._last.number + 1
        with ExitStack() as files:
            written = written_records(records, marker.to_text(), self._compression, files)
            if written is None and self._is_next(marker):
                return self._publish_nothing(marker)
            written = written or self._written_empty(marker, files)
            data = memoryview(mmap.mmap(written.file.fileno(), 0, access=mmap.ACCESS_READ))
            try:
                self._store.put(self._key(number), data, if_absent=True)
            except ConflictError as error:
                raise self._fenced() from error
        # Of the next checkpoint all publishers know the same; so where this one put the file, none was further.
        is_newest = self._last is None or self._is_next(marker)
        kept = self._keep(Published(number, marker), is_newest=is_newest)
        if kept.number == number and kept.marker != marker:
            raise self._fenced()
        # Another one has gone on from the file; its newest entry would not keep this one from going on, too.
        self._is_overtaken = kept.number > number
        self._last = Published(number, marker)
        return written.rows

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _is_next(self, marker: Marker) -> bool:
        if self._last is None:
            return False
        last, new = self._last.marker.checkpoint, marker.checkpoint
        return last.branch == new.branch and new.id <= last.id + 1

    def _publish_nothing(self, marker: Marker) -> int:
        """
        Advance the marker only, unless another publisher has put an entry.

        A file whose entry is not there yet has a greater number, and counts whatever this entry says.
        """
        assert self._last is not None
        published = Published(self._last.number, marker)
        try:
            self._entries.add(published)
        except ConflictError as error:
            raise self._fenced() from error
        self._last = published
        return 0

    def _fenced(self) -> FencedError:
        return FencedError(f"slot {self._slot.number} of sink {self._slot.sink!r} was published by another publisher")

    def _written_empty(self, marker: Marker, files: ExitStack) -> Written:
        if self._slot.columns is None:
            raise InvalidInputError("a slot without columns cannot be published to without records")
        file = temporary(files)
        write(file, [], self._slot.columns, marker.to_text(), self._compression)
        return Written(file, 0)

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number:012d}{_SUFFIX}"

    def _newest(self) -> Published | None:
        """Return the published state: that of the newest entry, or of a file that was put after it."""
        entry = self._entries.read()
        newest = self._listed() if entry is None else entry.number
        while self._exists(newest + 1):
            newest += 1
        if entry is not None and newest == entry.number:
            return entry
        if newest < 0:
            return None
        published = Published(newest, _marker(self._store, self._key(newest))).after(entry)
        return self._keep(published)

    def _keep(self, published: Published, *, is_newest: bool = False) -> Published:
        """
        Put an entry that tells of a file, unless another publisher's does; return what the newest one tells.

        Args:
            published: The state of the file.
            is_newest: Whether an entry that can be put is the newest one. Otherwise that is looked for: others may have
                put some meanwhile, and deleted those in between, in whose place it does not count.

        Raises:
            UnavailableError: It cannot be put. The file is published; the next publisher that opens the slot repeats
                this. Without an entry, the output would be published again once the file is deleted.
        """
        for _ in range(LOOKS):
            with suppress(ConflictError):
                self._entries.add(published)
                if is_newest:
                    return published
            newest = self._entries.read()
            if newest is not None and newest.number >= published.number:
                return newest
            published = published.after(newest)
        raise self._entries.restless()

    def _listed(self) -> int:
        """Return the highest number in a listing; -1 if there is none."""
        texts = (info.key.removeprefix(self._prefix).removesuffix(_SUFFIX) for info in self._store.list(self._prefix))
        return max((int(text) for text in texts if text.isdecimal()), default=-1)

    def _exists(self, number: int) -> bool:
        with suppress(NotFoundError):
            self._store.head(self._key(number))
            return True
        return False


def _check_names(columns: pa.Schema, slots: Sequence[Slot]) -> None:
    if hidden := {slot.sink for slot in slots if slot.sink.startswith("_")}:
        raise InvalidInputError(
            f"sink {hidden.pop()!r} cannot have Parquet files: readers leave out files whose names begin with an "
            "underscore. Give the sink another name, name=…"
        )
    if twice := list(same_names(list(columns))):
        raise InvalidInputError(f"columns {', '.join(twice)} are the same to Spark, which ignores case: rename one")


def _marker(store: ObjectStore, key: str) -> Marker:
    """Read the marker from the end of a file."""
    size_bytes = store.head(key).size_bytes
    tail = store.get_range(key, max(0, size_bytes - _TAIL_BYTES), min(size_bytes, _TAIL_BYTES))
    length, magic = _FOOTER.unpack(tail[-_FOOTER.size :].rjust(_FOOTER.size, b"\0"))
    if magic != _MAGIC or length + _FOOTER.size > size_bytes or length > _FOOTER_BYTES_MAX:
        raise CorruptDataError(f"file {key} is not a Parquet file; only the sink may write there", object_key=key)
    if length + _FOOTER.size > len(tail):
        tail = store.get_range(key, size_bytes - length - _FOOTER.size, length + _FOOTER.size)
    try:
        footer = pq.read_metadata(pa.BufferReader(_MAGIC + tail[-(length + _FOOTER.size) :]))
        return Marker.parse((footer.metadata or {})[MARKER].decode())
    except (pa.ArrowException, OSError, KeyError, InvalidInputError, ValueError) as error:
        raise CorruptDataError(f"file {key} has no marker: {error}", object_key=key) from error
