"""
The slots of a table's folder: which are held, and which are idle.

    <local_dir>/tables/
      cleaned               its time of change is the time of the last search for idle slots on this host
      <job>/<operator>/<key groups>/
        0.lock              locked while the slot's table is open; its time of change is the time of the last opening
        0/                  the table and its journal
        0.incoming/         a snapshot that comes in, or a table that is being removed
        0.snapshot-*/       snapshots that are stored, each locked by the process that works with it

A table stays when its task ends, for the next batch. It is useless once its partition went to another host or got
other key groups, or its job is gone. The only sign of that is that nobody opens it.

Only the holder removes a lock file. A process that locks a file which was removed meanwhile tries again with a new one.
Only what is called as above is ever removed, and no link is followed: whatever `local_dir` is, the rest is not ours.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from backend_client.table.snapshot import remove_left_behind
from storage.private_folder import make_private, open_lock

SLOTS_MAX = 16
IDLE_S = 24 * 3600  # that of `BackendSettings.local_idle_s`
_TABLES = "tables"
_INTERVAL_S = 3600
# Removing may take this long at a time, for a batch waits; what is left comes that much later.
_REMOVING_S = 1.0
_PAUSE_S = 60
_TRIES_MAX = 1000
_KEY_GROUPS = re.compile(r"[0-9]{5}-[0-9]{5}")

logger = logging.getLogger("backend_client")


def free_slots(root: Path) -> Iterator[tuple[Path, int]]:
    """
    Yield slots of a folder, which is made, that nobody holds, each with its lock, which is the caller's to close.

    Raises:
        OSError: The folder cannot be written.
    """
    for number in range(SLOTS_MAX):
        lock = _taken(root / f"{number}.lock")
        if lock is not None:
            yield root / str(number), lock


def remove_idle_slots(folder: Path, idle_s: float = IDLE_S) -> None:
    """
    Remove all slots of the host that were not opened for `idle_s`; at most once an hour, and only what can be.

    Args:
        folder: The folder of a table; if it does not lie within `tables`, nothing is done.
        idle_s: At least as long as any job may pause without having to restore its tables.
    """
    tables = folder.parents[2] if len(folder.parents) > 2 else folder
    if tables.name != _TABLES:
        return
    with suppress(OSError):
        marker = tables / "cleaned"
        if marker.exists() and _is_young(marker.stat(), _INTERVAL_S):
            return
        turn = open_lock(marker)
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_young(os.fstat(turn), _INTERVAL_S):
                os.utime(turn)
                if not _remove_idle(tables, idle_s):
                    again = time.time() - _INTERVAL_S + _PAUSE_S
                    os.utime(turn, (again, again))
        finally:
            os.close(turn)


def _taken(path: Path) -> int | None:
    """Take a lock, or return None: somebody has it."""
    for _ in range(_TRIES_MAX):
        try:
            lock = open_lock(path)
        except FileNotFoundError:  # the folder is new, or was removed just now
            with suppress(FileNotFoundError):
                make_private(path.parent)  # state is not for other users
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink:
                os.utime(lock)
                return lock
        except BlockingIOError:
            os.close(lock)
            return None
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
    raise FileNotFoundError(2, "it is removed again and again", str(path))


def _remove_idle(tables: Path, idle_s: float) -> bool:
    """Remove idle slots and what they leave empty; return whether all were looked at."""
    until, removed = time.monotonic() + _REMOVING_S, 0
    try:
        for lock in sorted(tables.glob("*/*/*-*/*.lock")):
            if time.monotonic() > until:
                return False
            with suppress(OSError):
                if _is_ours(lock) and _remove_if_idle(lock, idle_s):
                    removed += 1
                    for folder in lock.parents[:3]:
                        folder.rmdir()  # an error if something is in it, then all above have something, too
    finally:
        if removed:
            logger.info("tables in %s that nobody opened for %d s: %d removed", tables, idle_s, removed)
    return True


def _is_ours(lock: Path) -> bool:
    """Say whether a lock is one of a slot, by its place and name, and is reached without a link."""
    is_named = _KEY_GROUPS.fullmatch(lock.parent.name) and lock.stem.isdecimal()
    return bool(is_named) and not any(place.is_symlink() for place in (lock, *lock.parents[:3]))


def _remove_if_idle(path: Path, idle_s: float) -> bool:
    """Remove the slot of a lock; return False if it was opened not long ago or is held."""
    if _is_young(path.stat(), idle_s):
        return False
    lock = open_lock(path, 0)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_young(os.fstat(lock), idle_s):  # somebody opened it meanwhile, or even closed it again
            return False
        slot = path.with_suffix("")
        incoming = path.with_suffix(".incoming")
        shutil.rmtree(incoming, ignore_errors=True)
        with suppress(FileNotFoundError):
            os.rename(slot, incoming)  # half a table must not be opened, whatever ends this process
        shutil.rmtree(incoming, ignore_errors=True)
        for snapshot in path.parent.glob(f"{slot.name}.snapshot-*"):
            remove_left_behind(snapshot)
        if any(other.stem == slot.name and other != path for other in path.parent.iterdir()):
            return False  # a snapshot that the sidecar stores; the lock is needed to find it the next time
        os.unlink(path)
    finally:
        os.close(lock)
    return True


def _is_young(status: os.stat_result, age_s: float) -> bool:
    """Return whether a file changed at most `age_s` ago; a clock that was set back makes it no younger."""
    return abs(time.time() - status.st_mtime) <= age_s
