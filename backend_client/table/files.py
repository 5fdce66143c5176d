"""
Opens a table's files, and handles each failure.

    opened                   fails                   consequence
    to read                  for any reason          they are opened to write
    to write, for their      for any reason          an error, and the files stay unchanged: a caller that needs their
    content                                          content must never get an empty table instead
    to write, as they are    held by this process    `HeldError`: another slot may be free
                             for another reason      they are deleted, and an empty table is made
    to write, when empty     for any reason          `LocalDiskError`

If a table was opened to write, RocksDB's lock stays while any iterator over it lives, even after `close`.
Imports rocksdict, as `state_table` and `snapshot` do.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    ChecksumType,
    DBCompressionType,
    Options,
    Rdict,
    RdictIter,
    ReadOptions,
)

from backend_client.table.local_disk import LocalDiskError


class HeldError(LocalDiskError):
    """This process holds the table's files: an iterator over a closed table still lives."""


class TableFiles:
    """The folder of one table; the caller holds its slot."""

    def __init__(self, folder: Path, block_cache_bytes: int, options: Options | None = None) -> None:
        self._folder = folder
        self._options = options or _options(block_cache_bytes)

    def beside(self, folder: Path) -> TableFiles:
        """Return the files of another folder, with the same options and the same block cache."""
        return TableFiles(folder, 0, self._options)

    def open_to_read(self) -> Rdict:
        """Open existing files read-only; any error means that this is not possible."""
        return self._open(AccessType.read_only())

    def open_existing(self) -> Rdict:
        """Open existing files to write, or raise RocksDB's error; never creates or removes anything."""
        self._options.create_if_missing(False)
        return self._open()

    def open_or_begin(self) -> Rdict:
        """
        Open existing files to write; if there are none or they cannot be opened, an empty table.

        Raises:
            HeldError: This process holds the files.
            LocalDiskError: An empty table cannot be made either.
        """
        try:
            return self._open_or_make()
        except HeldError:
            raise
        except LocalDiskError:
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._open_or_make()

    def begin(self) -> Rdict:
        """
        Delete the files and open an empty table.

        Raises:
            LocalDiskError: An empty table cannot be made, or old files, which must not pass for it, cannot be removed.
        """
        try:
            if self._folder.exists():
                shutil.rmtree(self._folder)
        except OSError as error:
            raise LocalDiskError(f"the table in {self._folder} cannot be removed: {error.strerror}") from error
        return self._open_or_make()

    def _open_or_make(self) -> Rdict:
        self._options.create_if_missing(True)
        try:
            return self._open()
        except Exception as error:  # rocksdict raises nothing more specific
            if "lock hold by current process" in str(error):
                raise HeldError(f"the table in {self._folder} is still open in this process") from error
            raise LocalDiskError(
                f"no table can be opened in {self._folder}: {error}; check its disk for space"
            ) from error

    def _open(self, access: AccessType | None = None) -> Rdict:
        # Without options of its own, a column family of existing files gets those in the files, which lack the filter.
        return Rdict(str(self._folder), self._options, {"default": self._options}, access or AccessType.read_write())


def entries_from(table: Rdict, low: bytes, options: ReadOptions | None = None) -> Iterator[tuple[bytes, bytes]]:
    """
    Yield the entries of a table in raw mode from a key on, in key order.

    At damage, rocksdict's iterator ends as if there were no more entries, so its end is checked.

    Raises:
        Exception: RocksDB's error about the files, see `backend_client.table.local_disk.is_damage`.
    """
    entry: tuple[bytes, bytes] | None = None
    for entry in table.items(from_key=low, read_opt=options):  # type: ignore[assignment]  # raw mode has bytes only
        yield entry  # type: ignore[misc]
    end = table.iter()
    end.seek(low if entry is None else entry[0])
    if entry is not None and end.valid():
        end.next()
    end.status()


def entries_between(position: RdictIter, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
    """
    Yield the entries from `low` to `high`, exclusive, in key order.

    Args:
        position: An iterator of a table in raw mode, which is moved.
        low: The first key.
        high: The first key that is not meant. RocksDB's own bound cannot be used: rocksdict frees its bytes too early.

    Raises:
        Exception: As `entries_from`.
    """
    position.seek(low)
    while position.valid():
        key = position.key()
        if key >= high:
            return
        yield key, position.value()
        position.next()
    position.status()


def _options(block_cache_bytes: int) -> Options:
    options = Options(raw_mode=True)
    options.set_write_buffer_size(16 << 20)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_keep_log_file_num(1)
    options.set_max_background_jobs(2)
    options.set_max_file_opening_threads(2)  # the default of 16 threads takes longer to start than to open all files
    blocks = BlockBasedOptions()
    # The service verifies snapshots, and knows only this file format.
    blocks.set_format_version(6)
    blocks.set_checksum_type(ChecksumType.xxh3())
    blocks.set_index_block_restart_interval(1)
    blocks.set_bloom_filter(10, False)
    blocks.set_block_cache(Cache(block_cache_bytes))
    options.set_block_based_table_factory(blocks)
    return options
