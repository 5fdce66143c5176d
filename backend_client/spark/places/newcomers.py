"""
Gives partitions to executors that joined later, for a query without standbys.

Beside the batches, a small Spark job starts Python there and loads the code of tasks; another one prepares the tables
of those partitions that the executor's host is to take over, twice, so that the second pass only adds the changes of
the batches meanwhile. The next batch then runs them there. A failure costs time, never correctness: a task that finds
no table restores it itself, or sets its rows aside.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa

from backend_client.spark.batch import Receipt
from backend_client.spark.places.hosts import Hosts
from backend_client.spark.places.seats import Executor, Takeover
from dstl_service.wire import OperatorInfo

logger = logging.getLogger("backend_client")

_TASK = "backend_client.spark.task.task"

Prepare = Callable[[str, Takeover], Iterable[object]]
"""Returns the steps that make the tables of an operator ready where they are taken over; each step blocks."""


class Newcomers:
    """
    The executors of a query that joined later.

    Args:
        hosts: Where partitions run; None where they are not pinned, or with standbys, whose hosts warm up themselves.
        prepare: Prepares tables; runs in a thread of its own, once at a time.
    """

    def __init__(self, hosts: Hosts | None, prepare: Prepare) -> None:
        self._hosts = hosts
        self._prepare = prepare
        self._worker: threading.Thread | None = None
        self._is_closed = False

    def look(self, infos: Sequence[OperatorInfo]) -> None:
        """Look which executors there are when a batch begins, and begin to make new ones ready."""
        hosts = self._hosts
        if hosts is None:
            return
        hosts.look()
        if self.is_working or self._is_closed:
            return
        cold = hosts.cold
        counts = {info.parallelism for info in infos}
        wanted = {count: found for count in counts if (found := hosts.takeover(count)) is not None}
        if cold or wanted:
            work = hosts, cold, wanted, tuple(infos)
            self._worker = threading.Thread(target=self._work, args=work, name="dstl-newcomers", daemon=True)
            self._worker.start()

    def ran(self, infos: Iterable[OperatorInfo], receipts: Iterable[Receipt]) -> None:
        """Take where the tasks of a batch have run."""
        if self._hosts is None:
            return
        parallelism = {info.name: info.parallelism for info in infos}
        ran: dict[int, dict[int, str]] = {count: {} for count in parallelism.values()}
        for receipt in receipts:
            if receipt.host is not None and receipt.operator in parallelism:
                ran[parallelism[receipt.operator]][receipt.partition] = receipt.host
        self._hosts.ran(ran)

    @property
    def is_working(self) -> bool:
        """Whether new executors are being made ready."""
        return self._worker is not None and self._worker.is_alive()

    def close(self) -> None:
        """Begin nothing more; what is under way ends after its current step."""
        self._is_closed = True

    def _work(
        self, hosts: Hosts, cold: Sequence[Executor], wanted: dict[int, Takeover], infos: Sequence[OperatorInfo]
    ) -> None:
        try:
            if cold:
                hosts.frame_at((), cold).mapInArrow(_load, "loaded boolean").collect()
                hosts.warmed(cold)
        except Exception as error:  # noqa: BLE001 - the next batch tries again
            if not self._is_closed:
                logger.warning("new executors could not be made ready, they run no partition yet: %s", error)
        for count, takeover in wanted.items():
            self._prepared([info.name for info in infos if info.parallelism == count], takeover)
            if not self._is_closed:
                hosts.take_over(count, takeover)

    def _prepared(self, operators: Sequence[str], takeover: Takeover) -> None:
        try:
            for name in (*operators, *operators):  # twice, see above
                for _ in self._prepare(name, takeover):
                    if self._is_closed:
                        return
        except Exception as error:  # noqa: BLE001 - it only saves time
            logger.warning("tables could not be prepared on new hosts, the next batch restores them: %s", error)


def _load(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Load what a task of an operator needs."""
    for _ in batches:
        pass
    importlib.import_module(_TASK)
    yield pa.RecordBatch.from_arrays([pa.array([True])], ["loaded"])
