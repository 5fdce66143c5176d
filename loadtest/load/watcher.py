"""Watches a run beside its users: takes samples of processor time and memory, and begins and ends outages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import gevent
import psutil

from loadtest.load.result.usage import Usage
from loadtest.load.settings import SERVICE_PID_VARIABLE, STORE_VARIABLE
from loadtest.load.shapes import Shape
from tools.servers.faults.proxy import StoreControl

_TICK_S = 0.1
_SAMPLE_S = 1.0
_NOT_BUSY = ("idle", "iowait", "guest", "guest_nice")  # guests are part of user and nice


def store_control() -> StoreControl | None:
    """Return the control of the store that the load test started behind a proxy, if it did."""
    address, _, port = os.environ.get(STORE_VARIABLE, "").rpartition(":")
    return StoreControl(address, int(port)) if address else None


class Watcher:
    """
    Watches one run.

    Args:
        shape: The run's.
        add: Receives a sample every second.
        store: The store, if it has a proxy.
    """

    def __init__(self, shape: Shape, add: Callable[[Usage], None], store: StoreControl | None) -> None:
        self._shape = shape
        self._add = add
        self._store = store
        self._is_out = False
        pid = os.environ.get(SERVICE_PID_VARIABLE)
        self._service = psutil.Process(int(pid)) if pid else None
        self.began_s = time.monotonic()
        self._greenlet = gevent.spawn(self._run)

    @property
    def at_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.began_s

    def stop(self) -> None:
        """Take a last sample; end an outage."""
        self._greenlet.kill()
        self._add(self._sample())
        self._let(is_out=False)

    def _run(self) -> None:
        due_s = 0.0
        while True:
            at_s = self.at_s
            if at_s >= due_s:
                self._add(self._sample())
                due_s = at_s + _SAMPLE_S
            self._let(is_out=self._shape.phase_at(at_s).is_out)
            gevent.sleep(_TICK_S)

    def _let(self, *, is_out: bool) -> None:
        if self._store is not None and is_out != self._is_out:
            self._store.set_out(is_out=is_out)
            self._is_out = is_out

    def _sample(self) -> Usage:
        at_s, own_s, machine = self.at_s, time.process_time(), psutil.cpu_times()
        machine_s = sum(machine) - sum(getattr(machine, name, 0.0) for name in _NOT_BUSY)
        if self._service is None:
            return Usage(at_s, own_s, machine_cpu_s=machine_s)
        try:
            times = self._service.cpu_times()
            return Usage(at_s, own_s, times.user + times.system, self._service.memory_info().rss, machine_s)
        except psutil.Error:  # it has died, which its requests tell
            return Usage(at_s, own_s, machine_cpu_s=machine_s)
