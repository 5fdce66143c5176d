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
from locust import User, events, task
from locust import stats as locust_stats
from locust.runners import STATE_RUNNING

from loadtest.load.driver import SimulatedDriver
from loadtest.load.hosts import HostGoneError, SimulatedHost, measured
from loadtest.load.result.figures import Samples, figures_of
from loadtest.load.result.thresholds import read_thresholds, with_thresholds
from loadtest.load.settings import REPORT_VARIABLE, LoadSettings
from loadtest.load.watcher import Watcher, store_control
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
    """The driver: begins a batch at every tick of the shape; if it is late, it catches up for a while."""

    fixed_count = 1

    def on_start(self) -> None:
        """Connect; the first batch begins when the hosts have joined."""
        self.driver = SimulatedDriver(SETTINGS, record)
        self._watcher: Watcher | None = None
        self._is_over = False
        self._due_s = time.monotonic()

    def on_stop(self) -> None:
        """Close the connection."""
        if self._watcher is not None:
            self._watcher.stop()
        self.driver.close()

    def wait_time(self) -> float:
        """Return the time until the next batch is due."""
        now_s = time.monotonic()
        at_s = 0.0 if self._watcher is None else self._watcher.at_s
        period_s = 1 / (SETTINGS.rate * SETTINGS.phases.factor_at(at_s))
        self._due_s = max(self._due_s + period_s, now_s - _BEHIND_MAX_S)
        return max(0.0, self._due_s - now_s)

    @task
    def run_batch(self) -> None:
        """Run one batch and complete its checkpoint; end a headless run when its time is over."""
        if self._is_over or not HOSTS or self.environment.runner.state != STATE_RUNNING:
            return  # hosts are still joining or leaving
        if self._watcher is None:
            self._watcher = Watcher(SETTINGS.phases, SAMPLES.usage.append, store_control())
        if REPORT_VARIABLE in os.environ and self._watcher.at_s >= SETTINGS.duration_s:
            self._end(self._watcher)
            return
        try:
            with measured(record, "batch"):
                done = self.driver.run_batch(list(HOSTS))
        except HostGoneError:
            return
        except Exception:  # noqa: BLE001 - reported; the next call acts like a new driver
            gevent.sleep(_PAUSE_AFTER_FAILURE_S)
            return
        SAMPLES.add_checkpoint(self._watcher.at_s, done)
        _fire("COUNT", "checkpoint KiB", done.bytes_written / 1024, done.bytes_written)
        _fire("COUNT", "checkpoint objects", done.objects_written, 0)

    def _end(self, watcher: Watcher) -> None:
        self._is_over = True
        elapsed_s = watcher.at_s
        watcher.stop()
        store = store_control()
        figures = figures_of(SAMPLES, SETTINGS, elapsed_s, None if store is None else store.drawn())
        if SETTINGS.thresholds is not None:
            known = [figure.name for figure in figures]
            figures = with_thresholds(figures, read_thresholds(SETTINGS.thresholds, known))
        write_report_json(Path(os.environ[REPORT_VARIABLE]), figures)
        # Locust writes its CSV files at intervals, but not at the end.
        gevent.spawn_later(2 * locust_stats.CSV_STATS_INTERVAL_SEC, self.environment.runner.quit)
