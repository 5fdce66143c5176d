"""
A table for when this host's local folder is of no use: full, read-only, broken (I16).

The task then restores its partition into a folder in memory, where there is one, and throws it away at its end. That is
slow, and the next batch has to do it again, but neither the batch nor its checkpoint fails.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from backend_client.table.local_disk import LocalDiskError
from backend_client.table.slots import IDLE_S, remove_idle_slots
from backend_client.table.state_table import StateTable
from storage.private_folder import open_lock

_MEMORY = "/dev/shm"  # noqa: S108 - a folder of its own, readable by nobody else, is made in it
_PREFIX = "dstl-table-"

logger = logging.getLogger("backend_client")

_T = TypeVar("_T")


class MemoryTable(StateTable):
    """A table whose files are removed when it is closed."""

    @classmethod
    def make(cls) -> MemoryTable:
        """
        Open an empty table.

        Raises:
            UnavailableError: That is not possible either.
        """
        place = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else tempfile.gettempdir()
        _remove_left_behind(Path(place))
        try:
            folder = tempfile.mkdtemp(prefix=_PREFIX, dir=place)
        except OSError as error:
            raise LocalDiskError(f"no folder can be made for a table: {error}") from error
        return cls.open(folder)

    def close(self) -> None:
        """Close the table and remove its files."""
        super().close()
        shutil.rmtree(self._folder.parent, ignore_errors=True)


def open_advanced(
    folder: str | os.PathLike[str], advance: Callable[[StateTable], _T], idle_s: float = IDLE_S
) -> tuple[StateTable, _T]:
    """
    Open the table in `folder` and advance it; if the folder fails, do both with a spare table.

    Behind that, now and then, tables of the host that nobody opened for long make room.

    Args:
        folder: Where the table is kept.
        advance: Brings a table to where it has to be; called again with the spare one.
        idle_s: How long is long.

    Raises:
        DstlError: What `advance` raises for reasons other than the local disk's.
    """
    try:
        advanced = _advanced(StateTable.open(Path(folder)), advance)
    except Exception as error:
        if not _is_local(error):
            raise
        logger.warning("the local folder %s cannot be used, the state is restored into memory: %s", folder, error)
        advanced = None
    remove_idle_slots(Path(folder), idle_s)
    return advanced or _advanced(MemoryTable.make(), advance)


def _remove_left_behind(place: Path) -> None:
    """
    Remove spare tables of this user whose process was killed; one in use holds its slot's lock.

    Everybody may write this place, so a folder counts only if it is no link, is this user's, and holds such a lock.
    """
    for folder in place.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            lock = open_lock(folder / "0.lock", 0)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _advanced(table: StateTable, advance: Callable[[StateTable], _T]) -> tuple[StateTable, _T]:
    try:
        return table, advance(table)
    except BaseException as error:
        if _is_local(error):
            table.discard()
        table.close()
        raise


def _is_local(error: BaseException) -> bool:
    # rocksdict raises nothing more specific than Exception.
    return isinstance(error, LocalDiskError | OSError) or type(error) is Exception
