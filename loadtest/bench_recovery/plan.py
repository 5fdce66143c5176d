"""The plan of the benchmark: its sizes, the columns of its table, and the ways in which an executor is lost. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

HOSTS = 4
TASK, PROCESS, HOST, RESTART = "task fails", "process killed", "host cut off", "stop and start"
WAYS = (TASK, PROCESS, HOST)
"""How an executor, or what it runs, is lost; `RESTART` is that of the whole query, on empty local disks."""


@dataclass(frozen=True, slots=True)
class Size:
    """
    The size of a run.

    Args:
        keys: Keys of the state, a kilobyte each.
        rows: Rows of a batch.
        partitions: Those of the operator.
        trigger_s: Time between the starts of two batches.
        losses: How often each column loses an executor in each way.
        settled_batches: Batches after a start, and after a loss, before anything else happens.
    """

    keys: int
    rows: int
    partitions: int
    trigger_s: float
    losses: int
    settled_batches: int


FULL = Size(keys=2_000_000, rows=640, partitions=16, trigger_s=4.0, losses=2, settled_batches=4)
SHORT = Size(keys=4_000, rows=160, partitions=8, trigger_s=1.5, losses=1, settled_batches=2)


@dataclass(frozen=True, slots=True)
class Column:
    """
    A column of the table: one run of a query.

    Args:
        name: Its name, also on the command line.
        failover: The mode; empty for Spark's own operator.
        replicas: Copies of each table.
        ways: The ways in which it loses executors.
    """

    name: str
    failover: str = ""
    replicas: int = 0
    ways: tuple[str, ...] = WAYS

    @property
    def is_ours(self) -> bool:
        """Whether it runs on this project's backend."""
        return bool(self.failover)


COLUMNS = (
    *(Column(mode, mode) for mode in ("exact", "deferred", "bounded-loss")),
    *(Column(f"{mode}+standby", mode, replicas=1) for mode in ("exact", "deferred", "bounded-loss")),
    Column("restart", "exact", ways=(RESTART,)),
    Column("spark"),
)


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """
    The instructions for a driver's program.

    Args:
        size: The size of the run.
        column: The column.
        master: The cluster's URL.
        address: The driver's address.
        storage: URL of the state.
        checkpoint: Spark's checkpoint folder.
        folder: The column's folder: `OBSERVED` is written there, `STOP` ends the query.
    """

    size: Size
    column: Column
    master: str
    address: str
    storage: str
    checkpoint: str
    folder: str

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote."""
        found = json.loads(path.read_text(encoding="utf-8"))
        column = {**found.pop("column")}
        ways = tuple(column.pop("ways"))
        return cls(size=Size(**found.pop("size")), column=Column(**column, ways=ways), **found)
