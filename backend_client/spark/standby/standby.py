"""
A query's standbys, on the driver: tells tasks which host keeps which copies, and hears how far they are.

The tasks of a batch hand the plan to their hosts' followers. A host that runs no partition, because it has just come,
has no task, and one whose tasks are too slow is not heard of: a small Spark job beside the batch does it there. The
same job is the first one of an executor that has come later, which gets no partition before.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from backend_client.progress import BatchProgress
from backend_client.service.job_session import JobSession
from backend_client.settings import BackendSettings
from backend_client.spark.batch import Receipt
from backend_client.spark.places.hosts import Hosts
from backend_client.spark.places.seats import Executor
from backend_client.standby.orders import CopyPlan, StandbyReport, id_of
from backend_client.standby.tending import tended
from dstl_service.wire import CheckpointRef, OperatorInfo

logger = logging.getLogger("backend_client")

READY_LAG_MAX = 5
"""A host whose copies lack more checkpoints takes over no partition."""
SILENT_BATCHES_MAX = 3
"""A host without news for this number of batches gets the plan in a job of its own."""
_TOLD = "report string"


class Standby:
    """
    The standbys of one query.

    Args:
        session: The query's ownership of its job.
        settings: The query's settings.
        hosts: Where partitions run; None without standbys.
    """

    def __init__(self, session: JobSession, settings: BackendSettings, hosts: Hosts | None) -> None:
        self._session = session
        self._settings = settings
        self._hosts = hosts
        self._plan: CopyPlan | None = None
        self._reports: dict[str, StandbyReport] = {}
        self._heard_of: dict[str, int] = {}
        self._batches = 0
        self._telling: threading.Thread | None = None

    @property
    def ready(self) -> set[str]:
        """The hosts whose copies are complete and recent."""
        plan = self._plan
        return {
            report.host
            for report in list(self._reports.values())
            if plan is not None
            and report.tables
            and not report.missing
            and report.lag <= READY_LAG_MAX
            and report.tables_id == id_of(plan.of_host(report.host))
        }

    @property
    def output_replicas(self) -> int:
        """How many executors keep a batch's output."""
        return 2 if self._hosts is not None and len(self._hosts.executor_ids) > 1 else 1

    @property
    def is_telling(self) -> bool:
        """Whether a job that tells hosts the plan is under way."""
        return self._telling is not None and self._telling.is_alive()

    def plan(self, infos: Sequence[OperatorInfo]) -> CopyPlan | None:
        """Return which hosts keep which copies from the batch that begins on; None without standbys."""
        hosts = self._hosts
        if hosts is None:
            return None
        hosts.look(self.ready)
        seats = {info.name: found for info in infos if (found := hosts.seats(info.parallelism)) is not None}
        names = sorted({keeper for found in seats.values() for keeper in found.keepers if keeper is not None})
        at: dict[str | None, int] = {name: position for position, name in enumerate(names)}
        keepers = {name: tuple(at.get(keeper, -1) for keeper in found.keepers) for name, found in seats.items()}
        self._plan = CopyPlan(tuple(names), self._session.max_parallelism, keepers)
        self._reports = {name: report for name, report in self._reports.items() if name in at}
        running = {host for found in seats.values() for host in found.runners}
        self._batches += 1
        silent = {name for name in names if self._batches - self._heard_of.get(name, 0) > SILENT_BATCHES_MAX}
        self._tell(hosts, [name for name in names if name not in running or name in silent])
        return self._plan

    def heard(self, receipts: Iterable[Receipt], progress: BatchProgress) -> BatchProgress:
        """Note what tasks have heard from the followers of their hosts; return the progress with all hosts' figures."""
        for receipt in receipts:
            if receipt.standby is not None:
                self._note(StandbyReport(**receipt.standby))
        reports = list(self._reports.values())
        return replace(
            progress,
            standby_tables=sum(report.tables for report in reports),
            standby_missing=sum(report.missing for report in reports),
            standby_lag=max((report.lag for report in reports), default=0),
            standby_bytes=sum(report.size_bytes for report in reports),
        )

    def _note(self, report: StandbyReport) -> None:
        self._reports[report.host] = report
        self._heard_of[report.host] = self._batches

    def _tell(self, hosts: Hosts, idle: list[str]) -> None:
        """Tell idle hosts and cold executors the plan, unless the last telling is still under way."""
        base, plan, cold = self._session.base, self._plan, hosts.cold
        if not (idle or cold) or base is None or plan is None:
            return
        if self.is_telling:
            return
        order = ToldHost(self._settings, plan, self._session.job_uid, self._session.epoch, base)
        told = (hosts, idle, cold, order)
        self._telling = threading.Thread(target=self._run, args=told, name="dstl-standby", daemon=True)
        self._telling.start()

    def _run(self, hosts: Hosts, idle: list[str], cold: list[Executor], order: ToldHost) -> None:
        try:
            idle = [host for host in idle if host not in {executor.host for executor in cold}]
            for row in hosts.frame_at(idle, cold).mapInArrow(order.__call__, _TOLD).collect():
                self._note(StandbyReport(**json.loads(row.report)))
            hosts.warmed(cold)
        except Exception as error:  # noqa: BLE001 - the next batch tries again, and tasks need no copies
            logger.warning("hosts without partitions could not be told which copies they keep: %s", error)


@dataclass(frozen=True, slots=True)
class ToldHost:
    """The function that ``mapInArrow`` runs on a host without partitions; its input does not matter."""

    settings: BackendSettings
    plan: CopyPlan
    job_uid: str
    epoch: int
    base: CheckpointRef

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Hand the plan to this host's follower; yield what it says of itself, as JSON."""
        for _ in batches:
            pass
        report = tended(self.settings, self.plan, self.job_uid, self.epoch, self.base)
        texts = [] if report is None else [json.dumps(report)]
        yield pa.RecordBatch.from_arrays([pa.array(texts, pa.string())], ["report"])
