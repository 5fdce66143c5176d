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
other key groups, or its job is gone. The only sign of that is that it is no longer opened.

Only the holder removes a lock file. A process that locks a file which was removed meanwhile tries again with a new one.

A *follower* keeps a copy of another host's table near its newest checkpoint (`backend_client.standby`). It holds the
first slot for moments only, and says so in the lock's file. A task that finds it waits, and asks for the slot in the
same file. For a slot that another task holds it waits as long as it would take to restore the table, at most: Spark has
given that task up, and ends it within seconds.
Only files with the names above are ever removed, and no link is followed: everything else in `local_dir` is not ours.
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
_FOLLOWER = b"f"
_WANTED = b"w"
_FOLLOWER_MS_MAX = 2000
"""A task waits this long for a follower, which may be in the middle of a write that the task would have to repeat."""
_TASK_S_MAX = 4.0
"""Longest time until Spark kills the Python of a task that it has given up; until then the task may continue."""
_RESTORED_BYTES_PER_S = 100 << 20
_LOOK_S = 0.002
_IN_USE_S = 60
"""
A holder is not waited for if a later slot was opened this recently: the holder hangs, and batches use the later slot.
"""
_KEY_GROUPS = re.compile(r"[0-9]{5}-[0-9]{5}")

logger = logging.getLogger("backend_client")


def free_slots(root: Path, patience_s: float | None = None) -> Iterator[tuple[Path, int]]:
    """
    Yield free slots of a folder, which is made, each with its lock, which is the caller's to close.

    Args:
        root: The folder.
        patience_s: Longest time to wait for a slot that is held; None: as long as that makes sense.

    Raises:
        OSError: The folder cannot be written.
    """
    for number in range(SLOTS_MAX):
        path = root / f"{number}.lock"
        lock = _taken(path)
        if lock is None and not _is_later_slot_in_use(root, number):
            waits_s = _FOLLOWER_MS_MAX / 1000, _restored_in_s(root / str(number))
            lock = _taken_over(path, *(wait_s if patience_s is None else min(wait_s, patience_s) for wait_s in waits_s))
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


def follower_slot(root: Path) -> tuple[Path, int] | None:
    """
    Return the first slot of a folder, which is made, and its lock; None if it is held.

    Raises:
        OSError: The folder cannot be written.
    """
    path = root / "0.lock"
    lock = _taken(path)
    if lock is None:
        return None
    os.pwrite(lock, _FOLLOWER, 0)  # stays when the slot is free: the next task removes it
    return root / "0", lock


def is_wanted(lock: int) -> bool:
    """Say whether a task waits for the slot of a follower's lock."""
    return os.pread(lock, 1, 0) == _WANTED


def _is_later_slot_in_use(root: Path, number: int) -> bool:
    """Say whether a slot after this one was opened lately, and so has a table that is nearly as new."""
    for later in range(number + 1, SLOTS_MAX):
        with suppress(FileNotFoundError):
            if _is_young((root / f"{later}.lock").stat(), _IN_USE_S):
                return True
    return False


def _restored_in_s(slot: Path) -> float:
    """Return how long it takes to restore a slot's table, at least; not more than `_TASK_S_MAX`."""
    try:
        with os.scandir(slot) as entries:
            size_bytes = sum(entry.stat().st_size for entry in entries if entry.name.endswith(".sst"))
    except OSError:  # it is being replaced
        return 0.0
    return min(size_bytes / _RESTORED_BYTES_PER_S, _TASK_S_MAX)


def _taken_over(path: Path, follower_s: float, task_s: float) -> int | None:
    """Take a lock as soon as a follower or a task gives it up, within the given time; None if it does not."""
    begun_s = time.monotonic()
    time.sleep(_LOOK_S)  # a follower may have taken the lock just now, and not said yet who it is
    while time.monotonic() - begun_s < (follower_s if _asked_for(path) else task_s):
        time.sleep(_LOOK_S)
        lock = _taken(path)
        if lock is not None:
            return lock
    return _taken(path)


def _asked_for(path: Path) -> bool:
    """Ask a follower for its slot; return False if no follower holds it."""
    with suppress(FileNotFoundError):
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            said = os.pread(file, 1, 0)
            if said == _FOLLOWER:
                os.pwrite(file, _WANTED, 0)
            return said in (_FOLLOWER, _WANTED)
        finally:
            os.close(file)
    return True


def _taken(path: Path) -> int | None:
    """Take a lock, or return None if it is held."""
    for _ in range(_TRIES_MAX):
        try:
            lock = open_lock(path)
        except FileNotFoundError:  # the folder is new, or was removed just now
            with suppress(FileNotFoundError):
                make_private(path.parent)  # state is not for other users
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(lock)
            if status.st_nlink:
                if status.st_size:
                    os.ftruncate(lock, 0)
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
            logger.info("tables in %s that were not opened for %d s: %d removed", tables, idle_s, removed)
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
        if _is_young(os.fstat(lock), idle_s):  # another task opened it meanwhile, or even closed it again
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
