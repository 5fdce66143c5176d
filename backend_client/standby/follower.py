"""
The follower: a process per host and job that keeps copies of other hosts' tables near the newest checkpoint.

A copy is the same folder, in the same form, that a task of its partition opens on this host; so a partition that loses
its host continues here and lacks a few checkpoints. A copy is advanced as any table is, through the sidecar, to
completed checkpoints only (I1). It is open for moments: a task that wants it gets it at the end of the step, or at once
if the copy is not complete yet (`backend_client.table.slots`).

The process has a low priority, rests four fifths of the time, and holds one table open at a time, which bounds its
memory. It ends when no order came for as long as an idle sidecar lives, when the sidecar is gone or was started again,
and when it does not understand an order: the next task starts it again, with the code that is installed by then.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

from backend_client.service.job_session import connect_as
from backend_client.service.restore import advance_to_base
from backend_client.standby.copy_client import CopyClient, NoRoomError, WantedError
from backend_client.standby.orders import LOCK, LOG, ORDER, STATUS, Order, StandbyStatus, TableName, read_order, write
from backend_client.standby.upkeep import (
    NO_ROOM_S,
    SILENCE_S_MAX,
    Copy,
    Disk,
    has_room,
    in_turn,
    is_behind,
    rest_s,
    status_of,
    to_give_up,
)
from backend_client.table.local_disk import LocalDiskError, is_useless
from backend_client.table.opening import open_copy
from dstl_service.wire import CheckpointRef
from storage.errors import InvalidInputError, UnavailableError

logger = logging.getLogger("backend_client")

LOG_BYTES_MAX = 4 << 20
"""Size at which the log is begun anew; the one before is kept."""

_NICENESS = 10
_PATIENCE_S = 5.0
_LOOK_S = 0.1
_IDLE_S = 600
"""Stands for the idle time of a sidecar that never exits."""


def run(folder: Path) -> int:
    """Follow the orders in a folder until the job has ended; return the process's exit code."""
    logging.basicConfig(level=logging.INFO, handlers=[log_of(folder)])
    os.nice(_NICENESS)
    order = read_order(folder)
    if order is None:
        logger.error("the follower ends: %s has no order; the next task starts it again", folder)
        return 1
    client = connect_as(CopyClient, order.settings, _PATIENCE_S, may_start=False)
    try:
        Follower(folder, client).run(order)
    finally:
        client.close()
        for name in (STATUS, LOCK):  # tasks start another one, with the order of their batch
            with suppress(OSError):
                (folder / name).unlink()
    return 0


def log_of(folder: Path) -> logging.Handler:
    """Return what writes to the log in a folder; of a follower that runs for months, the newest lines stay."""
    handler: logging.Handler = logging.StreamHandler()
    with suppress(OSError):  # the folder is missing: whoever gave it by hand is told so
        handler = RotatingFileHandler(folder / LOG, maxBytes=LOG_BYTES_MAX, backupCount=1, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    return handler


class Follower:
    """
    The copies of one job on one host.

    Args:
        folder: Where the orders are.
        client: The client of this host's sidecar.
        clock_s: Tells seconds, and never goes back.
        pause: Waits for some seconds.
    """

    def __init__(
        self,
        folder: Path,
        client: CopyClient,
        clock_s: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._folder = folder
        self._client = client
        self._clock_s = clock_s
        self._pause = pause
        self._copies: dict[TableName, Copy] = {}
        self._no_room_until_s: dict[TableName, float] = {}
        self._said: dict[TableName, str] = {}
        self._told: StandbyStatus | None = None
        self._silent_since_s: float | None = None
        self._sidecar_pid: int | None = None
        self._stepping_s = 0.0

    @property
    def copies(self) -> dict[TableName, Copy]:
        """The complete copies."""
        return dict(self._copies)

    @property
    def remembered(self) -> int:
        """The number of facts about tables that are held."""
        return len(self._copies) + len(self._no_room_until_s) + len(self._said)

    def run(self, order: Order) -> None:
        """Follow this order and the ones after it; return when the job has ended, or the sidecar is gone or another."""
        ordered_s = self._clock_s()
        while True:
            if self._has_new_sidecar():
                logger.info(
                    "the sidecar was started again, perhaps with other code: the next task starts another follower"
                )
                return
            self.round(order)
            if self._silent_since_s is not None and self._clock_s() - self._silent_since_s > SILENCE_S_MAX:
                logger.info("the sidecar is gone")
                return
            newest = self._next(order, self._clock_s() + rest_s(self._stepping_s), ordered_s)
            if newest is None:
                logger.info("the follower ends: no recent order, no order file, or one of another version")
                return
            if newest.age != order.age:
                ordered_s = self._clock_s()
            order = newest

    def round(self, order: Order) -> None:
        """Bring all copies of an order forward, and make at most one that is missing."""
        ordered = frozenset(order.tables)  # after a change of parallelism, tables have other names
        of_order = ((name, copy) for name, copy in self._copies.items() if name in ordered)
        self._copies = {name: copy for name, copy in of_order if copy.is_of(order.base)}
        self._said = {name: what for name, what in self._said.items() if name in ordered}
        self._no_room_until_s = {name: at for name, at in self._no_room_until_s.items() if name in ordered}
        self._give_up_too_many(order)
        self._stepping_s, is_silent = 0.0, False
        for name in in_turn(self._wanted(order), self._copies):
            is_new = name not in self._copies
            try:
                self._bring_forward(order, name)
            except NoRoomError as error:
                self._no_room_until_s[name] = self._clock_s() + NO_ROOM_S
                self._say(name, f"has no copy here: {error}")
            except Exception as error:  # noqa: BLE001 - rocksdict raises nothing more specific
                self._copies.pop(name, None)
                self._say(name, f"is not copied now: {type(error).__name__}: {error}")
                is_silent = isinstance(error, UnavailableError) and not isinstance(error, LocalDiskError)
                if is_silent:
                    break
            if is_new and name in self._copies:
                break
        if not is_silent:
            self._silent_since_s = None
        elif self._silent_since_s is None:
            self._silent_since_s = self._clock_s()
        self._tell(order)

    def _wanted(self, order: Order) -> list[TableName]:
        """Return the tables of an order but those for which there was no room a short time ago."""
        now_s = self._clock_s()
        return [name for name in order.tables if self._no_room_until_s.get(name, now_s) <= now_s]

    def _bring_forward(self, order: Order, name: TableName) -> None:
        copy = self._copies.get(name)
        if copy is not None and copy.checkpoint_id >= order.base.id:
            return
        opened = open_copy(_table_folder(order, name))
        if opened is None:
            return  # a task has it, and advances it
        table, is_wanted = opened
        began_s = self._clock_s()
        try:
            version = None if table.version is None else CheckpointRef.parse(table.version)
            if version is not None and not is_behind(version, order.base):
                self._copies[name] = Copy(version.id, table.size_bytes(), version.branch)
                return
            self._client.before_part = lambda: _give_way(is_wanted)
            self._client.before_copy = lambda size_bytes: self._check_room(order, size_bytes)
            advance_to_base(table, self._client, order.settings.job, name.operator, name.key_groups, order.base)
            self._copies[name] = Copy(order.base.id, table.size_bytes(), order.base.branch)
        except WantedError:
            self._copies.pop(name, None)
        except Exception as error:
            if is_useless(error):
                table.discard()
            raise
        finally:
            table.close()
            if copy is not None:
                self._stepping_s += self._clock_s() - began_s

    def _check_room(self, order: Order, size_bytes: int) -> None:
        limit = order.settings.standby_bytes_max
        if not has_room(size_bytes, self._copies.values(), _disk(self._folder), limit):
            raise NoRoomError(
                f"{size_bytes} bytes would exceed standby_bytes_max or leave less than a tenth of the disk of "
                f"{self._folder} free"
            )

    def _give_up_too_many(self, order: Order) -> None:
        name = to_give_up(self._copies, _disk(self._folder), order.settings.standby_bytes_max)
        if name is None:
            return
        self._say(name, "has no copy any more: too little room")
        del self._copies[name]
        self._no_room_until_s[name] = self._clock_s() + NO_ROOM_S
        opened = open_copy(_table_folder(order, name))
        if opened is not None:
            table, _ = opened
            table.discard()
            table.close()

    def _say(self, name: TableName, what: str) -> None:
        """Log a trouble with a table, once as long as it stays the same."""
        if self._said.get(name) != what:
            self._said[name] = what
            logger.warning("%s, %s %s", name.operator, name.key_groups.to_text(), what)

    def _tell(self, order: Order) -> None:
        status = status_of(order.tables, self._copies, self._client.read_bytes)
        if status != self._told:
            with suppress(OSError):
                write(self._folder, STATUS, status)
                self._told = status

    def _next(self, order: Order, until_s: float, ordered_s: float) -> Order | None:
        """Return the order for the next round, which begins at `until_s` and when there is something to do."""
        while True:
            self._pause(_LOOK_S)
            now_s = self._clock_s()
            idle_s = order.settings.sidecar_idle_exit_s or _IDLE_S
            if not (self._folder / ORDER).exists() or now_s - ordered_s > idle_s:
                return None
            if now_s < until_s:
                continue
            newest = read_order(self._folder)
            if newest is None:
                return None
            if newest.job_uid != order.job_uid:
                raise InvalidInputError(f"{self._folder} has an order of job {newest.job_uid}, not {order.job_uid}")
            if newest.age != order.age or self._is_unfinished(newest):
                return newest

    def _has_new_sidecar(self) -> bool:
        """Return whether another process answers than at first: it may have been stopped for an upgrade."""
        try:
            pid = self._client.get("/health").get("pid")
        except UnavailableError:
            return False  # the round counts the silence
        self._sidecar_pid = self._sidecar_pid or pid
        return bool(pid != self._sidecar_pid)

    def _is_unfinished(self, order: Order) -> bool:
        copies = (self._copies.get(name) for name in self._wanted(order))
        return any(copy is None or copy.checkpoint_id < order.base.id for copy in copies)


def _table_folder(order: Order, name: TableName) -> str:
    return order.settings.private_folder("tables", order.job_uid, name.operator, name.key_groups.to_text())


def _disk(folder: Path) -> Disk:
    usage = shutil.disk_usage(folder)
    return Disk(usage.total, usage.free)


def _give_way(is_wanted: Callable[[], bool]) -> None:
    if is_wanted():
        raise WantedError
