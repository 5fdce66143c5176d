"""
The task's part of a standby: hands the newest order to this host's follower, and starts it if none runs.

Nothing here may fail a task (I16): a copy that is not kept is restored from the storage. It takes a task less than a
millisecond, and one task of a host and batch only.
"""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backend_client.service.launcher import run_detached
from backend_client.settings import BackendSettings
from backend_client.standby.executor_host import executor_host
from backend_client.standby.orders import (
    LOCK,
    LOG,
    ORDER,
    PID,
    TURN,
    CopyPlan,
    Order,
    StandbyReport,
    read_order,
    read_status,
    write,
)
from dstl_service.wire import CheckpointRef
from storage.errors import DstlError
from storage.private_folder import open_lock

logger = logging.getLogger("backend_client")

_tended: dict[str, tuple[int, int]] = {}
"""The newest order that this process has seen handed on, by job uid."""


def tended(
    settings: BackendSettings, plan: CopyPlan | None, job_uid: str, epoch: int, base: CheckpointRef | None
) -> dict[str, Any] | None:
    """
    Hand this batch's plan to the host's follower, unless another task did; return what the follower says of itself.

    Args:
        settings: The job's settings.
        plan: The driver's plan; None without standbys.
        job_uid: The job's uid.
        epoch: The driver's epoch.
        base: The newest checkpoint.

    Returns:
        A `StandbyReport` as a document; None if there is no news.
    """
    if plan is None or base is None or _tended.get(job_uid, (-1, -1)) >= (epoch, base.id):
        return None
    host = executor_host()
    if host is None:
        return None
    try:
        return _hand_on(Order(settings, job_uid, epoch, base, plan.of_host(host)), host)
    except (OSError, DstlError, subprocess.SubprocessError) as error:
        logger.warning("this host keeps no copies of tables for now: %s", error)
        return None


def follower_folder(settings: BackendSettings, job_uid: str) -> Path:
    """
    Make and return the folder of a job's follower on this host.

    Raises:
        UntrustedFolderError: Another user could change its content.
    """
    return Path(settings.private_folder("standby", job_uid))


def _hand_on(order: Order, host: str) -> dict[str, Any] | None:
    folder = follower_folder(order.settings, order.job_uid)
    with _locked(folder / TURN) as turn:
        if turn is None:
            return None  # another task does it at this moment
        known = read_order(folder)
        if known is not None and known.age >= order.age:
            _tended[order.job_uid] = known.age
            return None
        write(folder, ORDER, order)
        _tended[order.job_uid] = order.age
        if not order.tables:
            return None
        with _locked(folder / LOCK) as free:
            if free is not None:
                start_follower(folder, free)
        status = read_status(folder)
    return asdict(StandbyReport.of(host, status, order.base)) if status is not None else None


def start_follower(folder: Path, lock: int) -> int:
    """
    Start the follower of a folder, which takes this lock over; return its process id.

    Raises:
        OSError: It cannot be started.
        SubprocessError: The shell that starts it failed.
    """
    command = [sys.executable, "-m", "backend_client", "standby", str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    (folder / LOG).unlink(missing_ok=True)
    pid = run_detached(command, environment, folder / LOG, [lock])
    (folder / PID).write_text(f"{pid}\n", encoding="utf-8")
    return pid


@contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    """Lock a file as long as a copy of its descriptor is open; None if it is locked, or was removed just now."""
    lock = open_lock(path)
    try:
        yield lock if _is_taken(lock) and os.fstat(lock).st_nlink else None
    finally:
        os.close(lock)


def _is_taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
