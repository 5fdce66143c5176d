"""
The local table of one partition: key -> value in RocksDB, with the checkpoint of its content.

A table is a cache (I16): it may be lost at any time and is rebuilt from the log. It contains only changes of completed
checkpoints (I1): a batch's changes arrive when a later batch advances the table past it.
The version is written in the same write as the changes; if they need several writes, it is withdrawn before and set
after them. So a process that dies in between never leaves a table with a wrong version, and RocksDB's own log is not
needed. Most batches only open a table to read; its newest changes are then in its journal (`journal`).

`files` opens the files and handles failures; `layered_reads` reads them overlaid with the journal. A table belongs to
one task at a time: other tasks of the host with the same key groups (speculative copies, zombies) get another *slot*
(`slots`). A slot's snapshots are beside it; opening the slot removes those that a crash left behind.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Self

import pyarrow as pa
from rocksdict import Rdict

from backend_client.table import layered_reads
from backend_client.table.files import HeldError, TableFiles
from backend_client.table.journal import BYTES_MAX, CHANGES_MAX, TableJournal, memory_bytes
from backend_client.table.local_disk import LocalDiskError, is_useless
from backend_client.table.slots import SLOTS_MAX, free_slots
from backend_client.table.snapshot import VERSION_KEY, IncomingSnapshot, making_snapshot, remove_left_behind
from backend_client.table.writes import write, write_entries
from storage.change_set import ChangeColumns, in_columns

logger = logging.getLogger("backend_client")

_BATCHES_IN_JOURNAL = 4
"""A journal pays off if it has room for the changes of this many batches."""


class StateTable:
    """An open table. Not thread-safe; close it, or its lock stays until the process ends."""

    def __init__(self, folder: Path, lock_fd: int, block_cache_bytes: int) -> None:
        self._folder = folder
        self._incoming = folder.with_name(f"{folder.name}.incoming")
        self._lock_fd = lock_fd
        self._files = TableFiles(folder, block_cache_bytes)
        for left in folder.parent.glob(f"{folder.name}.snapshot-*"):
            remove_left_behind(left)
        shutil.rmtree(self._incoming, ignore_errors=True)
        self._journal = TableJournal(folder / "journal")
        self._few_changes = False
        self._has_overlay = False
        self._own: Rdict | None = None
        """The table itself while a copy replaces it for reads."""
        self._copy = self._beside()
        self._may_copy = True
        self._is_damaged = False
        to_read = self._open_to_read()
        self._is_writable = to_read is None
        self._table = to_read or self._files.open_or_begin()
        self.get: Callable[[bytes], bytes | None] = layered_reads.reader(self._table, self._journal)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], cache_bytes: int = 32 << 20, patience_s: float | None = None) -> Self:
        """
        Open the first slot of `free_slots`; a table that RocksDB cannot open is deleted and starts empty.

        Raises:
            LocalDiskError: The folder cannot be written, or all slots are taken by running tasks.
        """
        root = Path(folder)
        try:
            for slot, lock_fd in free_slots(root, patience_s):
                try:
                    return cls(slot, lock_fd, cache_bytes)
                except HeldError:
                    os.close(lock_fd)
                except BaseException:
                    os.close(lock_fd)
                    raise
        except OSError as error:
            raise LocalDiskError(
                f"the local state folder {root} cannot be used: {error.strerror}; set local_dir to a writable folder"
            ) from error
        raise LocalDiskError(f"all {SLOTS_MAX} table slots of {root} are held by running tasks")

    @property
    def version(self) -> str | None:
        """The checkpoint of the table's content, or None: it is empty, or a restore was interrupted."""
        data = self._table.get(VERSION_KEY)
        return self._journal.version or (data.decode() if data else None)

    def size_bytes(self) -> int:
        """Return the table's approximate size: its files and its memory tables."""
        names = ("rocksdb.live-sst-files-size", "rocksdb.cur-size-all-mem-tables")
        return sum(self._table.property_int_value(name) or 0 for name in names)

    def advance(self, changes: Iterable[tuple[bytes, bytes | None]], version: str) -> int:
        """Apply changes in order (None deletes) and set the new version; return the number of changes."""
        return self.advance_columns(in_columns(changes), version)

    def advance_columns(self, parts: Iterable[ChangeColumns], version: str) -> int:
        """Advance the table as `advance` does, with columns; later parts win."""
        left, few, rows, size_bytes = iter(parts), list[ChangeColumns](), 0, 0
        for part in left:
            few.append(part)
            rows += len(part.keys)
            size_bytes += memory_bytes(part)
            if rows > CHANGES_MAX or size_bytes > BYTES_MAX:
                break
        are_few = rows <= CHANGES_MAX and size_bytes <= BYTES_MAX
        if are_few and not self._is_writable and self._journal.append(few, self.version, version):
            self.get = layered_reads.reader(self._table, self._journal)
            return rows
        if are_few:
            self._write_journal(few, version)
            self._journal.hold(few)  # most keys that will be read are then in memory
            self.get = layered_reads.reader(self._table, self._journal)
        else:
            self._write_journal()
            self._journal.forget()  # its remaining changes are older than the new ones
            self.get = layered_reads.reader(self._table, self._journal)
            rows = write(self._table, chain(few, left), version)
        self._few_changes = rows <= CHANGES_MAX // _BATCHES_IN_JOURNAL
        return rows

    def _write_journal(self, parts: Sequence[ChangeColumns] = (), new_version: str | None = None) -> None:
        """
        Write the journal's changes, and over them those that lead to a new version; each key is written once.

        Opens the table for writing if needed.
        """
        if not self._is_writable:
            self._open_to_write()
        if new_version is not None:
            self._journal.add(parts, new_version)
        version = self._journal.version
        if version is None:
            return
        self._few_changes = True  # as the batches before had few
        write(self._table, [self._journal.latest()], version)
        self._journal.forget()
        self.get = layered_reads.reader(self._table, self._journal)

    def _open_to_write(self) -> None:
        """
        Open the table for writing; if that fails, it stays open to read, unchanged.

        Raises:
            LocalDiskError: It cannot be opened, or was replaced: the journal must not be written over another table.
        """
        stored = self._table.get(VERSION_KEY)
        try:
            table = self._files.open_existing()
            found = table.get(VERSION_KEY)
        except Exception as error:
            why = f"the table in {self._folder} cannot be opened for writing: {error}; check its disk for space"
            raise LocalDiskError(why) from error
        if found != stored:
            table.close()
            raise LocalDiskError(f"the table in {self._folder} stood at {stored!r}, now at {found!r}: it was replaced")
        self._table.close()
        self._table, self._is_writable = table, True
        self.get = layered_reads.reader(self._table, self._journal)

    def overlay(self, parts: Iterable[ChangeColumns]) -> None:
        """
        Overlay changes on all reads that the table must not contain yet (I1); closing the table drops them.

        Changes that exceed the memory bounds are written into a copy of the table, which shares its files. If the disk
        fails, they stay in memory regardless (I16).
        """
        self._has_overlay = True
        for part in parts:
            if not self._put_into_copy(part):
                self._journal.add([part], "")
        self.get = layered_reads.reader(self._table, self._journal)

    def _put_into_copy(self, part: ChangeColumns) -> bool:
        """Write a part into the copy, if there is one or memory has no room; return whether it was written."""
        if not self._may_copy or (self._own is None and self._journal.has_room(part)):
            return False
        try:
            if self._own is None:
                self._go_on_in_copy()
            write(self._table, [part], "")
        except Exception as error:  # noqa: BLE001 - rocksdict raises nothing more specific
            self._may_copy = False  # later parts overlay this one, so they stay in memory, too
            logger.warning("overlaid changes of the table in %s stay in memory: %s", self._folder, error)
        return self._may_copy

    def _go_on_in_copy(self) -> None:
        """Replace the table by a copy with all of the journal's changes."""
        self._copy = self._beside()
        with making_snapshot(self._table, self._copy):
            self._own, self._table = self._table, self._files.beside(self._copy).open_existing()
        write(self._table, [self._journal.latest()], "")
        self._journal.forget()

    def _leave_copy(self) -> None:
        if self._own is not None:
            with suppress(Exception):  # the copy is deleted anyway
                self._table.close()
            self._table, self._own = self._own, None
            shutil.rmtree(self._copy, ignore_errors=True)

    def _beside(self) -> Path:
        return self._folder.with_name(f"{self._folder.name}.snapshot-{uuid.uuid4().hex}")

    def clear(self) -> None:
        """
        Empty the table.

        Raises:
            LocalDiskError: Its files cannot be removed; they must not pass for a new table.
        """
        self._table.close()
        self._begin()

    def _begin(self) -> None:
        self._journal.forget()
        self._table, self._is_writable = self._files.begin(), True
        self.get = layered_reads.reader(self._table, self._journal)

    @contextmanager
    def making_snapshot(self) -> Iterator[Path]:
        """
        Make a snapshot of the table; yield its folder, which the process that accepts it in this context removes.

        Raises:
            LocalDiskError: It cannot be made. If damaged files are the reason, no later snapshot could be made either,
                so they are deleted when the table is closed; until then it serves its task.
        """
        assert not self._has_overlay
        folder = self._beside()
        try:
            self._bring_in_journal()
            with making_snapshot(self._table, folder):
                yield folder
        except LocalDiskError as error:
            self._is_damaged = is_useless(error.__cause__)
            raise

    def _bring_in_journal(self) -> None:
        try:
            self._write_journal()
        except LocalDiskError:
            raise
        except Exception as error:  # rocksdict raises nothing more specific
            raise LocalDiskError(f"no snapshot can be made of {self._folder}: {error}") from error

    def receiving(self, index: str, version: str) -> closing[IncomingSnapshot]:
        """
        Receive a stored snapshot beside the table; unless adopted within this context, it is removed.

        Args:
            index: Key of the snapshot's index.
            version: The checkpoint of its table.
        """
        return closing(IncomingSnapshot(self._incoming, index, version))

    def adopt(self, incoming: IncomingSnapshot) -> None:
        """
        Replace the table by the files of a snapshot of the same key groups, and take its version.

        Raises:
            CorruptDataError: The files are not a table at that version.
            LocalDiskError: They cannot be moved or opened here. In both cases this table is then empty.
        """
        self._table.close()
        try:
            shutil.rmtree(self._folder)
            os.rename(incoming.folder, self._folder)
            self._journal.forget()
            self._table, self._is_writable = self._files.open_existing(), True
            incoming.check_version(self._table.get(VERSION_KEY))
            self.get = layered_reads.reader(self._table, self._journal)
        except Exception as error:
            with suppress(Exception):
                self._table.close()
            self._begin()
            raise incoming.unusable(error) from error

    def copy(self, entries: Iterable[tuple[bytes, bytes]]) -> None:
        """Take entries of a snapshot into this table, which was cleared; `advance` then gives it its version."""
        write_entries(self._table, entries)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield all keys with their values, in key order."""
        return (entry for entry in layered_reads.scan(self._table, self._journal, b"") if entry[0] != VERSION_KEY)

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the keys that begin with `prefix`, with their values, in key order."""
        return layered_reads.scan(self._table, self._journal, prefix)

    def get_many(self, keys: pa.Array, covered: float) -> pa.Array:
        """
        Return the values of many keys, null where there is none.

        Args:
            keys: Binary, each once, in any order.
            covered: Approximate share of the table between the first and the last key. If most of it is requested, one
                scan is faster than single look-ups.
        """
        return layered_reads.read_many(self._table, self._journal, keys, covered)

    def between(self, ranges: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
        """Yield the entries of ranges of keys, each from one key to another, exclusive, in key order."""
        return layered_reads.between(self._table, self._journal, ranges)

    def close(self) -> None:
        """Close the table and free its slot. Idempotent."""
        self._leave_copy()
        if self._is_damaged:
            self.discard()
        with suppress(Exception):  # a cache that cannot be closed properly is rebuilt; the task must not fail (I16)
            self._table.close()
            if self._is_writable:
                self._journal.end(keep=self._few_changes)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def discard(self) -> None:
        """Delete the table's damaged files, so that the slot starts empty next time (I16). Call `close` afterwards."""
        self._leave_copy()
        with suppress(Exception):
            self._table.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _open_to_read(self) -> Rdict | None:
        """Open a table whose last changes were few; return None if it has to be opened for writing."""
        if not self._journal.is_kept:
            return None
        try:
            table = self._files.open_to_read()
            version = table.get(VERSION_KEY)
            self._journal.load(version.decode() if version else None)
        except Exception:  # noqa: BLE001 - rocksdict raises nothing more specific
            self._journal.forget()
            return None
        return table
