"""Starts the pipeline's programs, kills parts of it, and ends it when all that was committed has passed through."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import psycopg

from examples.merchant_orders.connector import ADVANCE_EVERY_S
from examples.merchant_orders.events.dirty import DirtyWriter
from examples.merchant_orders.topics import PARTITIONS, RESULT
from examples.merchant_orders.trial.processes import DemoError, Program, last_batch, sidecar_pid
from examples.merchant_orders.trial.reader import Transactions, create_topics
from tools.reporting.figures import Figure, Goal

_POLL_S = 0.005
_POLL_DATABASE_S = 0.1  # each time is a connection, for which the database starts a process
_BATCHES_BETWEEN = 3
_IN_BATCH_S = 0.2
_RESTARTS_MAX = 3


class Kill(NamedTuple):
    """What was killed, when, and the newest batch at that time."""

    what: str
    killed_s: float
    batch: int


class Run:
    """
    One run: the programs from their starts to their ends, and four kills.

    Args:
        work: Folder of state, checkpoint, Parquet files and logs.
        servers: Addresses of the brokers.
        orders_min: The generator goes on until the database has had this many orders, and all kills are over.
        timeout_s: When to give up.
    """

    def __init__(self, work: Path, servers: str, orders_min: int, timeout_s: float) -> None:
        self.events: list[tuple[float, str]] = []
        self.figures: list[Figure] = []
        self.kills = 0
        self.restarts = 0
        """How often the job ended by itself and was started again."""
        self.parquet = work / "totals"
        self._servers = servers
        self._orders_min = orders_min
        self._began_s = time.monotonic()
        self._deadline_s = self._began_s + timeout_s
        self._checkpoint, self._local_dir = work / "checkpoint", work / "local"
        self._storage = (work / "state").resolve().as_uri()
        where = ["--storage", self._storage, "--checkpoint", str(self._checkpoint), "--local-dir", str(self._local_dir)]
        self.shop = Program("shop", [], work)
        self._connector = Program("connector", [], work)
        self._job = Program("job", where, work)
        self._totals = Program("totals", ["--output", str(self.parquet)], work)
        self._programs = (self.shop, self._connector, self._job)
        self.dirty = DirtyWriter(servers, seed=7)

    def play(self) -> None:
        """
        Run the pipeline to its end, with the kills.

        Raises:
            DemoError: A program ended by itself, or the time is over.
        """
        create_topics(self._servers, PARTITIONS)
        try:
            self.shop.start()
            self._job.start()
            self._wait(self._has_slot, "the shop's tables", _POLL_DATABASE_S)
            self._connector.start()
            with self.dirty:
                self._wait_for_batches(_BATCHES_BETWEEN)
                self._kill_connector()
                self._wait_for_batches(_BATCHES_BETWEEN)
                self._kill_driver()
                self._wait_for_batches(_BATCHES_BETWEEN)
                self._kill_workers()
                self._wait_for_batches(_BATCHES_BETWEEN)
                self._kill_sidecar()
                self._wait(lambda: self._orders() >= self._orders_min, f"order {self._orders_min:,}", _POLL_DATABASE_S)
            for program in self._programs:
                program.finish()
            self._note("all programs have ended")
            seconds = time.monotonic() - self._began_s
            self.figures.append(Figure("run time until all programs have ended", seconds, "s", Goal("<=", 240)))
            self._totals.start()
            self._totals.wait()
        finally:
            for program in (*self._programs, self._totals):
                program.kill()
            self._stop_sidecar()

    def _kill_connector(self) -> None:
        """Kill the connector about halfway between two moments at which it tells the database what is sent."""
        before = self._confirmed()
        self._wait(lambda: self._confirmed() != before, "the connector's confirmation", _POLL_DATABASE_S)
        time.sleep(ADVANCE_EVERY_S / 2)
        self._connector.kill()
        self._connector.start()
        self._note("killed the connector; it sends again what it had not confirmed to the database")
        self.kills += 1

    def _kill_driver(self) -> None:
        """Kill the driver while it has output published: its workers end the transactions, or the next ones do."""
        self._wait_for_open_transaction()
        self._job.kill()
        kill = self._killed("driver while it published")
        self._job.start()
        self._wait_for_next_batch(kill)

    def _kill_workers(self) -> None:
        """Kill the Python workers in a transaction: their tasks are tried again, which aborts it."""
        workers = self._job.python_workers()
        self._wait_for_open_transaction()
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        kill = self._killed("Python workers in a transaction")
        with closing(Transactions(self._servers, RESULT, PARTITIONS[RESULT])) as transactions:
            self.figures.append(Figure("transactions left open by the workers", int(transactions.is_open()), ""))
        self._wait_for_next_batch(kill)

    def _kill_sidecar(self) -> None:
        """Kill the sidecar in the middle of a batch; the job starts another one."""
        if (pid := sidecar_pid(self._storage, self._local_dir)) is None:
            raise DemoError("no sidecar was running, so none was killed")
        self._wait(self._is_in_the_middle, "the middle of a batch")
        os.kill(pid, signal.SIGKILL)
        self._wait_for_next_batch(self._killed("sidecar in a batch"))
        if sidecar_pid(self._storage, self._local_dir) in (pid, None):
            raise DemoError("no other sidecar has started")

    def _killed(self, what: str) -> Kill:
        kill = Kill(what, time.monotonic(), last_batch(self._checkpoint))
        self._note(f"killed the {what}, after batch {kill.batch}")
        return kill

    def _wait_for_next_batch(self, kill: Kill) -> None:
        """Wait until a batch has finished that had not begun before a kill."""
        self._wait(lambda: last_batch(self._checkpoint) > kill.batch + 1, f"a batch after the kill of the {kill.what}")
        resume_s = time.monotonic() - kill.killed_s
        self._note(f"the second batch after it has finished, {resume_s:.1f} s later")
        self.figures.append(Figure(f"time to resume: {kill.what}", resume_s, "s"))
        self.kills += 1

    def _wait_for_open_transaction(self) -> None:
        with closing(Transactions(self._servers, RESULT, PARTITIONS[RESULT])) as transactions:
            self._wait(transactions.is_open, "an open transaction", poll_s=0)

    def _is_in_the_middle(self) -> bool:
        """Return whether a batch that had not begun a moment ago is still running."""
        before = last_batch(self._checkpoint, "offsets")
        time.sleep(_IN_BATCH_S)
        return before == last_batch(self._checkpoint) < last_batch(self._checkpoint, "offsets")

    def _confirmed(self) -> Any:
        with psycopg.connect() as connection:
            return connection.execute("select confirmed_flush_lsn from pg_replication_slots").fetchone()

    def _has_slot(self) -> bool:
        with psycopg.connect() as connection:
            return connection.execute("select from pg_replication_slots").fetchone() is not None

    def _orders(self) -> int:
        with psycopg.connect() as connection:
            row = connection.execute("select last_value from orders_order_id_seq").fetchone()
        return int(row[0]) if row else 0

    def _wait_for_batches(self, count: int) -> None:
        target = last_batch(self._checkpoint) + count
        self._wait(lambda: last_batch(self._checkpoint) >= target, f"batch {target}")

    def _wait(self, condition: Callable[[], bool], what: str, poll_s: float = _POLL_S) -> None:
        while not condition():
            for program in (self.shop, self._connector):
                program.check()
            self._keep_job_running()
            if time.monotonic() > self._deadline_s:
                raise DemoError(f"{what} did not come before the end of --timeout-s")
            time.sleep(poll_s)

    def _keep_job_running(self) -> None:
        try:
            self._job.check()
        except DemoError as error:
            self.restarts += 1
            if self.restarts > _RESTARTS_MAX:
                raise
            self._note(f"{str(error).partition(';')[0]}; it is started again")
            self._job.start()

    def _note(self, text: str) -> None:
        self.events.append((time.monotonic() - self._began_s, text))
        print(f"{self.events[-1][0]:4.0f} s: {text}", flush=True)

    def _stop_sidecar(self) -> None:
        """Ask it to stop; otherwise it would wait for its idle time."""
        if (pid := sidecar_pid(self._storage, self._local_dir)) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
