"""
How the files of a table are opened, and what follows where they cannot be.

    opened                   cannot be               what follows
    to read                  for any reason          they are opened to write
    to write, for their      for any reason          the error, and the files stay as they are: whoever needs what they
    content                                          hold must never get an empty table for it
    to write, as they are    held by this process    `HeldError`: another slot may be free
                             for another reason      they are thrown away, and an empty table is made
    to write, when empty     for any reason          `LocalDiskError`

RocksDB's lock on the files stays while an iterator over a table lives that was opened to write, closed or not.
Knows rocksdict, as `state_table` and `snapshot` do.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from rocksdict import AccessType, BlockBasedOptions, Cache, ChecksumType, DBCompressionType, Options, Rdict

from backend_client.table.local_disk import LocalDiskError


class HeldError(LocalDiskError):
    """This process holds the table's files: something still iterates over a table that was closed."""


class TableFiles:
    """The folder of one table; whoever opens it holds its slot."""

    def __init__(self, folder: Path, block_cache_bytes: int, options: Options | None = None) -> None:
        self._folder = folder
        self._options = options or _options(block_cache_bytes)

    def beside(self, folder: Path) -> TableFiles:
        """Return another folder of files, which are opened likewise and share the memory for blocks."""
        return TableFiles(folder, 0, self._options)

    def open_to_read(self) -> Rdict:
        """Open what is there to read it; any error means that it cannot be."""
        return Rdict(str(self._folder), self._options, access_type=AccessType.read_only())

    def open_existing(self) -> Rdict:
        """Open what is there to write, or raise what RocksDB does; never makes a table, nor removes anything."""
        self._options.create_if_missing(False)
        return Rdict(str(self._folder), self._options)

    def open_or_begin(self) -> Rdict:
        """
        Open what is there to write, or an empty table if there is nothing or it cannot be opened.

        Raises:
            HeldError: This process holds the files.
            LocalDiskError: There cannot be an empty table either.
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
        Throw away what is there and open an empty table.

        Raises:
            LocalDiskError: There cannot be one, or its files cannot be removed; they must not pass for a new table.
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
            return Rdict(str(self._folder), self._options)
        except Exception as error:  # rocksdict raises nothing more specific
            if "lock hold by current process" in str(error):
                raise HeldError(f"the table in {self._folder} is held by this process") from error
            raise LocalDiskError(f"no table can be opened in {self._folder}: {error}; is its disk full?") from error


def entries_from(table: Rdict, low: bytes) -> Iterator[tuple[bytes, bytes]]:
    """
    Yield what a table in raw mode holds from a key on, in key order.

    At damage an iterator of rocksdict just ends, as if there were no more, so its end is checked.

    Raises:
        Exception: What RocksDB says of the files, see `backend_client.table.local_disk.is_damage`.
    """
    entry: tuple[bytes, bytes] | None = None
    for entry in table.items(from_key=low):  # type: ignore[assignment]  # raw mode has bytes only
        yield entry  # type: ignore[misc]
    end = table.iter()
    end.seek(low if entry is None else entry[0])
    if entry is not None and end.valid():
        end.next()
    end.status()


def _options(block_cache_bytes: int) -> Options:
    options = Options(raw_mode=True)
    options.set_write_buffer_size(16 << 20)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_keep_log_file_num(1)
    options.set_max_background_jobs(2)
    blocks = BlockBasedOptions()
    # Snapshots are verified by the service, which knows just this form of their files.
    blocks.set_format_version(6)
    blocks.set_checksum_type(ChecksumType.xxh3())
    blocks.set_index_block_restart_interval(1)
    blocks.set_bloom_filter(10, False)
    blocks.set_block_cache(Cache(block_cache_bytes))
    options.set_block_based_table_factory(blocks)
    return options
