"""
Opens the table of a partition and advances it; a table in memory takes its place where the local disk fails (I16).

Every task opens its table here. A failure of the local folder costs time, never a batch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from backend_client.table.local_disk import LocalDiskError
from backend_client.table.memory_table import MemoryTable
from backend_client.table.slots import IDLE_S, follower_slot, is_wanted, remove_idle_slots
from backend_client.table.state_table import StateTable

logger = logging.getLogger("backend_client")

_T = TypeVar("_T")

_COPY_CACHE_BYTES = 1 << 20  # hardly anything is read


def open_advanced(
    folder: str | os.PathLike[str],
    advance: Callable[[StateTable], _T],
    idle_s: float = IDLE_S,
    patience_s: float | None = None,
) -> tuple[StateTable, _T]:
    """
    Open the table in `folder` and advance it; if the folder fails, use a spare table.

    Also removes, at most once an hour, the host's tables that were not opened for `idle_s`.

    Args:
        folder: Where the table is kept.
        advance: Advances a table; called again with the spare one.
        idle_s: Idle time in seconds.
        patience_s: Longest time to wait for another task that has the table; None: as long as that makes sense.

    Raises:
        DstlError: `advance` failed for a reason other than the local disk.
    """
    try:
        advanced = _advanced(StateTable.open(Path(folder), patience_s=patience_s), advance)
    except Exception as error:
        if not _is_local(error):
            raise
        logger.warning(
            "the local folder %s cannot be used, the state is restored into memory for this batch: %s", folder, error
        )
        advanced = None
    remove_idle_slots(Path(folder), idle_s)
    return advanced or _advanced(MemoryTable.make(), advance)


def open_copy(folder: str | os.PathLike[str]) -> tuple[StateTable, Callable[[], bool]] | None:
    """
    Open a standby's copy of a table; None while a task or its snapshot's maker has it.

    A task that opens the table waits for the copy to be closed. The function that is returned, too, says whether one
    does; call it before the copy is closed only.

    Raises:
        LocalDiskError: The folder cannot be used.
    """
    try:
        found = follower_slot(Path(folder))
    except OSError as error:
        raise LocalDiskError(f"no copy can be kept in {folder}: {error.strerror}") from error
    if found is None:
        return None
    slot, lock = found
    try:
        return StateTable(slot, lock, _COPY_CACHE_BYTES), lambda: is_wanted(lock)
    except BaseException:
        os.close(lock)
        raise


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
