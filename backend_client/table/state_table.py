"""
The local table of one partition: key -> value in RocksDB, with the checkpoint that it stands at.

A table is a cache (I16): it may be lost at any time and is rebuilt from the log. It only ever holds what completed
checkpoints contain (I1): the changes of a batch come in when a later batch advances the table past it.
The version is written in the same write as the changes, or withdrawn before and set after them when they need several,
so a process that dies in between leaves a table that knows what it is. RocksDB's own log is not used for that reason.
Most batches only open a table to read; the newest changes lie in its journal then (`journal`).

How its files are opened, and what follows where they cannot be, is a table in `files`; reads with what the journal lays
over them are in `layered_reads`. A table belongs to one task at a time: other tasks of the host that want the same key
groups (speculative copies, zombies) get another *slot* (`slots`). Beside a slot lie its snapshots; who opens the slot
removes those that a crash left behind.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Self

import pyarrow as pa
from rocksdict import Rdict

from backend_client.table import layered_reads
from backend_client.table.files import HeldError, TableFiles
from backend_client.table.journal import BYTES_MAX, CHANGES_MAX, TableJournal, memory_bytes
from backend_client.table.local_disk import LocalDiskError, is_damage
from backend_client.table.slots import SLOTS_MAX, free_slots
from backend_client.table.snapshot import VERSION_KEY, IncomingSnapshot, making_snapshot, remove_left_behind
from backend_client.table.writes import write
from storage.change_set import ChangeColumns, in_columns

logger = logging.getLogger("backend_client")

_BATCHES_IN_JOURNAL = 4
"""A journal is worth it if it takes the changes of so many batches."""


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
        """The table itself, while a copy is read in its place."""
        self._copy = self._beside()
        self._may_copy = True
        self._is_damaged = False
        to_read = self._open_to_read()
        self._is_writable = to_read is None
        self._table = to_read or self._files.open_or_begin()
        self.get: Callable[[bytes], bytes | None] = layered_reads.reader(self._table, self._journal)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], block_cache_bytes: int = 32 << 20) -> Self:
        """
        Open the first free slot below `folder`; a table that RocksDB cannot open is thrown away and begun anew.

        Raises:
            LocalDiskError: The folder cannot be written, or all slots are taken by running tasks.
        """
        root = Path(folder)
        try:
            for slot, lock_fd in free_slots(root):
                try:
                    return cls(slot, lock_fd, block_cache_bytes)
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
        """The checkpoint that the table stands at, or None: it is empty or was left in the middle of a restore."""
        data = self._table.get(VERSION_KEY)
        return self._journal.version or (data.decode() if data else None)

    def size_bytes(self) -> int:
        """Return about how large the table is: its files, and what is in memory only."""
        names = ("rocksdb.live-sst-files-size", "rocksdb.cur-size-all-mem-tables")
        return sum(self._table.property_int_value(name) or 0 for name in names)

    def advance(self, changes: Iterable[tuple[bytes, bytes | None]], version: str) -> int:
        """Apply changes in order (None deletes) and take the new version; return how many keys they have."""
        return self.advance_columns(in_columns(changes), version)

    def advance_columns(self, parts: Iterable[ChangeColumns], version: str) -> int:
        """Do the same with parts, those of later ones over those of earlier ones."""
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
            self._journal.hold(few)  # most of what will be read is in memory already
            self.get = layered_reads.reader(self._table, self._journal)
        else:
            self._write_journal()
            self._journal.forget()  # what it may still hold is older than what comes
            self.get = layered_reads.reader(self._table, self._journal)
            rows = write(self._table, chain(few, left), version)
        self._few_changes = rows <= CHANGES_MAX // _BATCHES_IN_JOURNAL
        return rows

    def _write_journal(self, parts: Sequence[ChangeColumns] = (), new_version: str | None = None) -> None:
        """
        Write what the journal holds, and over it what leads on to a new version; a key that is in both is written once.

        The table is opened for writing, if it is not.
        """
        if not self._is_writable:
            self._open_to_write()
        if new_version is not None:
            self._journal.add(parts, new_version)
        version = self._journal.version
        if version is None:
            return
        self._few_changes = True  # for so they were before
        write(self._table, [self._journal.latest()], version)
        self._journal.forget()
        self.get = layered_reads.reader(self._table, self._journal)

    def _open_to_write(self) -> None:
        """
        Open the table for writing; if that fails, it stays open to read, with all that it holds.

        Raises:
            LocalDiskError: It cannot be, or is another one by now: the journal must not be written over that.
        """
        stored = self._table.get(VERSION_KEY)
        try:
            table = self._files.open_existing()
            found = table.get(VERSION_KEY)
        except Exception as error:
            why = f"the table in {self._folder} cannot be opened to be written: {error}; is its disk full?"
            raise LocalDiskError(why) from error
        if found != stored:
            table.close()
            raise LocalDiskError(f"the table in {self._folder} stood at {stored!r}, now at {found!r}: it was replaced")
        self._table.close()
        self._table, self._is_writable = table, True
        self.get = layered_reads.reader(self._table, self._journal)

    def overlay(self, parts: Iterable[ChangeColumns]) -> None:
        """
        Let all reads see changes that the table must not have yet (I1); they are gone when it is closed.

        What is too much for memory is written into a copy of the table, which shares the files that there are. What
        the disk does not take stays in memory all the same (I16).
        """
        self._has_overlay = True
        for part in parts:
            if not self._put_into_copy(part):
                self._journal.add([part], "")
        self.get = layered_reads.reader(self._table, self._journal)

    def _put_into_copy(self, part: ChangeColumns) -> bool:
        """Write a part into the copy if there is one or memory has no room for it; return whether that was done."""
        if not self._may_copy or (self._own is None and self._journal.has_room(part)):
            return False
        try:
            if self._own is None:
                self._go_on_in_copy()
            write(self._table, [part], "")
        except Exception as error:  # noqa: BLE001 - rocksdict raises nothing more specific
            self._may_copy = False  # what comes now belongs over this part, so into memory as well
            logger.warning("changes over the table in %s stay in memory: %s", self._folder, error)
        return self._may_copy

    def _go_on_in_copy(self) -> None:
        """Put a copy in the table's place, with all that the journal lets reads see."""
        self._copy = self._beside()
        with making_snapshot(self._table, self._copy):
            self._own, self._table = self._table, self._files.beside(self._copy).open_existing()
        write(self._table, [self._journal.latest()], "")
        self._journal.forget()

    def _leave_copy(self) -> None:
        if self._own is not None:
            with suppress(Exception):  # it is thrown away
                self._table.close()
            self._table, self._own = self._own, None
            shutil.rmtree(self._copy, ignore_errors=True)

    def _beside(self) -> Path:
        return self._folder.with_name(f"{self._folder.name}.snapshot-{uuid.uuid4().hex}")

    def clear(self) -> None:
        """
        Empty the table.

        Raises:
            LocalDiskError: Its files cannot be removed; what they hold must not pass for a new table.
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
        Make a snapshot of the table; yield its folder, which whoever takes it over within this context removes.

        Raises:
            LocalDiskError: It cannot be made. If that is because files are damaged, nothing ever is again, so they are
                thrown away when the table is closed; it serves its task until then.
        """
        assert not self._has_overlay
        folder = self._beside()
        try:
            self._bring_in_journal()
            with making_snapshot(self._table, folder):
                yield folder
        except LocalDiskError as error:
            self._is_damaged = is_damage(error.__cause__)
            raise

    def _bring_in_journal(self) -> None:
        try:
            self._write_journal()
        except LocalDiskError:
            raise
        except Exception as error:  # rocksdict raises nothing more specific
            raise LocalDiskError(f"no snapshot can be made of {self._folder}: {error}") from error

    @contextmanager
    def receiving(self, index: str, version: str) -> Iterator[IncomingSnapshot]:
        """
        Take a stored snapshot in beside the table; what is not adopted within this context is removed.

        Args:
            index: Key of the snapshot's index.
            version: The checkpoint at which its table stood.
        """
        incoming = IncomingSnapshot(self._incoming, index, version)
        try:
            yield incoming
        finally:
            incoming.close()

    def adopt(self, incoming: IncomingSnapshot) -> None:
        """
        Take the files of a snapshot of the same key groups as the table's own, and so its version.

        Raises:
            CorruptDataError: They are no table at that version.
            LocalDiskError: They cannot be moved or opened here. In both cases this table is empty then.
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
            keys: Binary, in any order.
            covered: About which share of the table lies between the first and the last key. Where many of it are
                asked for, one scan is quicker than looking each of them up.
        """
        return layered_reads.read_many(self._table, self._journal, keys, covered)

    def between(self, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the keys from `low` up to `high`, without it, with their values, in key order."""
        return layered_reads.between(self._table, self._journal, low, high)

    def close(self) -> None:
        """Close the table and give its slot free; counts once."""
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
        """Throw the table away, for its files are damaged; who opens the slot next begins anew (I16). Then `close`."""
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
