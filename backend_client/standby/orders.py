"""
The orders to a follower, and its answers: small files in `local_dir`, each replaced as a whole.

    <local_dir>/standby/<job uid>/
      lock           held by the follower while it runs
      turn           held by the task that looks after the follower
      order.json     written by tasks: the newest checkpoint, and the tables of which this host keeps copies
      status.json    written by the follower: how far it is
      log, log.1     what the follower says, a few megabytes at most
      pid            its process id

The driver decides which host keeps which copies. Its plan travels with every batch to all tasks, and the first task of
a host hands it on. So a follower never asks for news.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from backend_client.settings import BackendSettings
from dstl_service.wire import CheckpointRef
from storage.errors import DstlError, InvalidInputError
from storage.key_groups import KeyGroupRange, key_group_range

ORDER, STATUS, LOCK, TURN, LOG, PID = "order.json", "status.json", "lock", "turn", "log", "pid"


@dataclass(frozen=True, slots=True)
class TableName:
    """One table of a job."""

    operator: str
    key_groups: KeyGroupRange


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """
    Which host keeps a copy of which table.

    Args:
        hosts: The hosts, as Spark names them.
        max_parallelism: The job's number of key groups.
        keepers: For each operator and each of its partitions, the position among `hosts` of the host that keeps the
            copy; -1 for none.
    """

    hosts: tuple[str, ...]
    max_parallelism: int
    keepers: Mapping[str, tuple[int, ...]]

    def of_host(self, host: str | None) -> tuple[TableName, ...]:
        """Return the tables of which a host keeps copies; None: a host that does not know its name."""
        if host is None or host not in self.hosts:
            return ()
        at = self.hosts.index(host)
        return tuple(
            TableName(operator, key_group_range(partition, len(keepers), self.max_parallelism))
            for operator, keepers in self.keepers.items()
            for partition, keeper in enumerate(keepers)
            if keeper == at
        )


@dataclass(frozen=True, slots=True)
class Order:
    """
    The work of a follower.

    Args:
        settings: The job's settings.
        job_uid: The job's uid.
        epoch: The epoch of the driver that decided so.
        base: The newest checkpoint.
        tables: The tables to keep copies of.
    """

    settings: BackendSettings
    job_uid: str
    epoch: int
    base: CheckpointRef
    tables: tuple[TableName, ...]

    @property
    def age(self) -> tuple[int, int]:
        """Grows from one order of a job to the next."""
        return self.epoch, self.base.id

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        tables = [[table.operator, table.key_groups.first, table.key_groups.last] for table in self.tables]
        return json.dumps({**asdict(self), "base": self.base.to_text(), "tables": tables})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """
        Parse an order.

        Raises:
            InvalidInputError: It is of another version of this package, or no order.
        """
        try:
            document = json.loads(text)
            tables = tuple(
                TableName(str(operator), KeyGroupRange(int(first), int(last)))
                for operator, first, last in document["tables"]
            )
            return cls(
                BackendSettings(**document["settings"]),
                str(document["job_uid"]),
                int(document["epoch"]),
                CheckpointRef.parse(document["base"]),
                tables,
            )
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidInputError(f"not an order for a standby: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class StandbyStatus:
    """
    How far a host's copies are.

    Args:
        tables: Number of copies that are complete, at whatever checkpoint.
        missing: Number of copies that are not complete yet, or have no room.
        oldest_id: Checkpoint id of the oldest complete copy; -1 without one.
        size_bytes: Size of all complete copies.
        read_bytes: Bytes of snapshots and change sets that were applied since the follower's start.
        tables_id: `id_of` the tables that were ordered.
    """

    tables: int = 0
    missing: int = 0
    oldest_id: int = -1
    size_bytes: int = 0
    read_bytes: int = 0
    tables_id: int = 0

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse a status; raises as `Order.from_json` does."""
        try:
            return cls(**{name: int(value) for name, value in json.loads(text).items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidInputError(f"not a status of a standby: {error}") from error


def id_of(tables: Iterable[TableName]) -> int:
    """Return a number that differs for other tables, but with a probability of one in four billion."""
    names = sorted(f"{table.operator} {table.key_groups.to_text()}" for table in tables)
    return zlib.crc32("\n".join(names).encode())


def read_order(folder: Path) -> Order | None:
    """Return the present order of a follower's folder; None if there is none that this version understands."""
    with suppress(OSError, DstlError):
        return Order.from_json((folder / ORDER).read_text(encoding="utf-8", errors="replace"))
    return None


def read_status(folder: Path) -> StandbyStatus | None:
    """Return the present status in a follower's folder; None if there is none."""
    with suppress(OSError, DstlError):
        return StandbyStatus.from_json((folder / STATUS).read_text(encoding="utf-8", errors="replace"))
    return None


def write(folder: Path, name: str, what: Order | StandbyStatus) -> None:
    """
    Replace a file of a follower's folder.

    Raises:
        OSError: It cannot be written.
    """
    new = folder / f"{name}.{os.getpid()}"
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(what.to_json())
    os.replace(new, folder / name)


@dataclass(frozen=True, slots=True)
class StandbyReport:
    """
    A status as the driver hears of it.

    Args:
        host: The host.
        tables: Number of complete copies.
        missing: Number of the others.
        lag: How many checkpoints the oldest complete copy lacks.
        size_bytes: Size of all complete copies.
        tables_id: `id_of` the tables of which it keeps copies.
    """

    host: str
    tables: int
    missing: int
    lag: int
    size_bytes: int
    tables_id: int

    @classmethod
    def of(cls, host: str, status: StandbyStatus, base: CheckpointRef) -> Self:
        """Return the report of a status when `base` is the newest checkpoint."""
        lag = max(0, base.id - status.oldest_id) if status.tables else 0
        return cls(host, status.tables, status.missing, lag, status.size_bytes, status.tables_id)
