"""
The simulated driver: owns the job by an epoch, runs batch after batch on the hosts, and completes their checkpoints.

It also keeps the expected content of every table at the newest completed checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gevent.queue import Queue

from backend_client.service.client import ServiceClient
from backend_client.service.job_session import JobSession
from backend_client.settings import BackendSettings
from dstl_service.wire import OperatorInfo
from loadtest.load.hosts import ATTEMPTS_PER_TASK, OPERATOR, Batch, Record, SimulatedHost, TaskResult, measured
from loadtest.load.settings import LoadSettings
from loadtest.load.workload import SimulatedTable, WrongDataError
from storage.key_groups import KeyGroupRange

RESTART_EVERY = 100
"""After this many checkpoints the driver restarts: it takes the job over with a higher epoch."""

_TASK_TIMEOUT_S = 90
_QUERY_ID = "load-test"


@dataclass(frozen=True, slots=True)
class Completed:
    """A completed checkpoint, and its cost."""

    checkpoint_id: int
    latency_ms: float
    bytes_written: int
    objects_written: int


class SimulatedDriver:
    """
    Runs the batches of one job.

    Args:
        settings: The load test's.
        record: Receives its requests.
    """

    def __init__(self, settings: LoadSettings, record: Record) -> None:
        assert settings.service is not None
        self._settings = settings
        self._record = record
        self._client = ServiceClient(settings.service, settings.token)
        storage = str(self._client.get("/v1/info")["storage"])
        self._backend = BackendSettings(
            storage, settings.job, service=settings.service, max_parallelism=settings.max_parallelism
        )
        self._session: JobSession | None = None
        self._truth = SimulatedTable(KeyGroupRange(0, settings.max_parallelism - 1))
        self._next_attempt = 0
        self._results: list[TaskResult] = []

    def run_batch(self, hosts: Sequence[SimulatedHost]) -> Completed:
        """
        Run the next batch on these hosts, with as many partitions as they have slots, and complete its checkpoint.

        Raises:
            Exception: The batch failed and was reported; the next call acts like a restarted driver.
        """
        session = self._owned_session()
        checkpoint_id = session.base.id + 1 if session.base else 0
        try:
            self._results = self._run_tasks(session, checkpoint_id, hosts)
            completed = self._complete(session, checkpoint_id)
        except Exception:
            self._session = None
            raise
        self._accept(session)
        if (checkpoint_id + 1) % RESTART_EVERY == 0:
            self._session = None
        return completed

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _owned_session(self) -> JobSession:
        """Take the job over, unless this driver owns it; its newest checkpoint must be the last completed one."""
        if self._session is None:
            with measured(self._record, "open"):
                session = JobSession.open(self._client, self._backend)
                if _text(session) != self._truth.version and self._results:
                    self._accept(session)  # the answer was lost, but the checkpoint exists
                if _text(session) != self._truth.version:
                    raise WrongDataError(
                        f"the job is at {_text(session)}, but its last checkpoint was {self._truth.version}"
                    )
            self._results = []
            self._session = session
        return self._session

    def _accept(self, session: JobSession) -> None:
        """Add the batch's changes to the expected tables."""
        for result in self._results:
            self._truth.apply(result.changes)
        self._results = []
        self._truth.version = _text(session)

    def _run_tasks(self, session: JobSession, checkpoint_id: int, hosts: Sequence[SimulatedHost]) -> list[TaskResult]:
        with measured(self._record, "begin"):
            session.begin(checkpoint_id)
        parallelism = min(sum(len(host) for host in hosts), session.max_parallelism)
        batch = Batch(
            checkpoint_id=checkpoint_id,
            epoch=session.epoch,
            attempt_first=self._next_attempt,
            base=_text(session),
            parallelism=parallelism,
            max_parallelism=session.max_parallelism,
            truth=self._truth,
            results=Queue(),
        )
        self._next_attempt += ATTEMPTS_PER_TASK * parallelism
        partition = 0
        for host in hosts:
            host.give(batch, partition)
            partition += len(host)
        arrived = [batch.results.get(timeout=_TASK_TIMEOUT_S) for _ in range(parallelism)]
        for result in arrived:
            if isinstance(result, Exception):
                raise result
        return [result for result in arrived if isinstance(result, TaskResult)]

    def _complete(self, session: JobSession, checkpoint_id: int) -> Completed:
        refs = [ref for result in self._results for ref in result.refs]
        plan = session.plan(refs, [OperatorInfo(OPERATOR, len(self._results), "", {})], _QUERY_ID, "")
        with measured(self._record, "checkpoint") as checkpoint:
            with measured(self._record, "persist") as persist:
                persist.size_bytes = sum(ref.size_bytes for ref in refs)
                session.flush(checkpoint_id, plan)
                self._client.persist(self._settings.job, session.epoch, refs)
            answer = session.complete(checkpoint_id, plan)
            checkpoint.size_bytes = answer.bytes_written
        return Completed(checkpoint_id, checkpoint.elapsed_ms, answer.bytes_written, answer.objects_written)


def _text(session: JobSession) -> str | None:
    return session.base.to_text() if session.base else None
