"""
Locust's view of the load test: one user per simulated host, one for the driver, and their reports.

Besides the requests, two rows of the statistics count per checkpoint: ``checkpoint KiB`` and ``checkpoint objects``;
their values are KiB and objects where locust prints milliseconds.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import gevent
import psutil
from locust import User, events, task
from locust import stats as locust_stats
from locust.runners import STATE_RUNNING

from loadtest.load.driver import SimulatedDriver
from loadtest.load.figures import Samples, figures_of
from loadtest.load.hosts import HostGoneError, SimulatedHost, measured
from loadtest.load.settings import REPORT_VARIABLE, SERVICE_PID_VARIABLE, LoadSettings
from tools.reporting.figures import write_report_json

SETTINGS = LoadSettings.of(os.environ)
HOSTS: list[SimulatedHost] = []
SAMPLES = Samples()

_PERCENTILES = [0.5, 0.9, 0.99, 0.999]
locust_stats.PERCENTILES_TO_REPORT = _PERCENTILES
locust_stats.PERCENTILES_TO_STATISTICS = _PERCENTILES
locust_stats.PERCENTILES_TO_CHART = _PERCENTILES

_POLL_S = 0.5
_BEHIND_MAX_S = 5.0
_PAUSE_AFTER_FAILURE_S = 1.0


def record(name: str, elapsed_ms: float, size_bytes: int, error: Exception | None) -> None:
    """Report a request to locust, and keep its exact time."""
    SAMPLES.add(name, elapsed_ms, error)
    _fire("DSTL", name, elapsed_ms, size_bytes, error)


def _fire(kind: str, name: str, value: float, size_bytes: int, error: Exception | None = None) -> None:
    events.request.fire(  # type: ignore[no-untyped-call]
        request_type=kind, name=name, response_time=value, response_length=size_bytes, exception=error, context={}
    )


def _cpu_s() -> tuple[float, float | None]:
    """Return the CPU time of this process, and that of the service if its process is known."""
    pid = os.environ.get(SERVICE_PID_VARIABLE)
    times = psutil.Process(int(pid)).cpu_times() if pid else None
    return time.process_time(), times.user + times.system if times else None


class HostUser(User):
    """A host: serves batches with its slots."""

    def on_start(self) -> None:
        """Join; the next batch is divided among the slots of all hosts."""
        self.simulated = SimulatedHost(SETTINGS, SETTINGS.slots_of(len(HOSTS)), record)
        HOSTS.append(self.simulated)

    def on_stop(self) -> None:
        """Leave; the next batch is divided among the others."""
        HOSTS.remove(self.simulated)
        self.simulated.close()

    @task
    def serve(self) -> None:
        """Run the tasks of the next batch."""
        self.simulated.serve(_POLL_S)


class DriverUser(User):
    """The driver: begins a batch at every tick; if it is late, it catches up for a while."""

    fixed_count = 1

    def on_start(self) -> None:
        """Connect; the first batch begins when the hosts have joined."""
        self.driver = SimulatedDriver(SETTINGS, record)
        self._started_s: float | None = None
        self._started_cpu_s: tuple[float, float | None] = (0.0, None)
        self._is_over = False
        self._due_s = time.monotonic()

    def on_stop(self) -> None:
        """Close the connection."""
        self.driver.close()

    def wait_time(self) -> float:
        """Return the time until the next batch is due."""
        now_s = time.monotonic()
        self._due_s = max(self._due_s + 1 / SETTINGS.rate, now_s - _BEHIND_MAX_S)
        return max(0.0, self._due_s - now_s)

    @task
    def run_batch(self) -> None:
        """Run one batch and complete its checkpoint; end a headless run when its time is over."""
        if self._is_over or not HOSTS or self.environment.runner.state != STATE_RUNNING:
            return  # hosts are still joining or leaving
        if self._started_s is None:
            self._started_s, self._started_cpu_s = time.monotonic(), _cpu_s()
        if REPORT_VARIABLE in os.environ and time.monotonic() >= self._started_s + SETTINGS.duration_s:
            self._end()
            return
        try:
            with measured(record, "batch"):
                done = self.driver.run_batch(list(HOSTS))
        except HostGoneError:
            return
        except Exception:  # noqa: BLE001 - reported; the next call acts like a new driver
            gevent.sleep(_PAUSE_AFTER_FAILURE_S)
            return
        SAMPLES.checkpoints.append(done)
        _fire("COUNT", "checkpoint KiB", done.bytes_written / 1024, done.bytes_written)
        _fire("COUNT", "checkpoint objects", done.objects_written, 0)

    def _end(self) -> None:
        assert self._started_s is not None
        self._is_over = True
        elapsed_s = time.monotonic() - self._started_s
        (own_s, service_s), (own_before_s, service_before_s) = _cpu_s(), self._started_cpu_s
        service_cpu_s = None if service_s is None or service_before_s is None else service_s - service_before_s
        figures = figures_of(SAMPLES, SETTINGS, elapsed_s, own_s - own_before_s, service_cpu_s)
        write_report_json(Path(os.environ[REPORT_VARIABLE]), figures)
        # Locust writes its CSV files at intervals, but not at the end.
        gevent.spawn_later(2 * locust_stats.CSV_STATS_INTERVAL_SEC, self.environment.runner.quit)
