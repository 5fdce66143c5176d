"""The work of tasks for their host's follower: they hand orders on once, and start it where it is needed."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from backend_client.settings import BackendSettings
from backend_client.standby import tending
from backend_client.standby.orders import LOCK, ORDER, STATUS, TURN, CopyPlan, StandbyStatus, read_order, write
from backend_client.standby.tending import follower_folder, tended
from dstl_service.wire import CheckpointRef
from storage.private_folder import open_lock

PLAN = CopyPlan(("here", "there"), 128, {"op": (0, 1, 0, 0)})


class Host:
    """A host with its local folder, on which tasks run in processes of their own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings = BackendSettings("file:///s", "job", local_dir=str(folder), standby_replicas=1)
        self.folder = follower_folder(self.settings, "uid")
        self.started = 0
        self.name: str | None = "here"
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(tending, "start_follower", self._start)
        monkeypatch.setattr(tending, "executor_host", lambda: self.name)

    def _start(self, *_: Any) -> int:
        self.started += 1
        return 1

    def task(self, base_id: int | None, epoch: int = 1, plan: CopyPlan | None = PLAN) -> dict[str, Any] | None:
        """Run a task in a new worker."""
        self._monkeypatch.setattr(tending, "_tended", {})
        base = None if base_id is None else CheckpointRef(base_id, 0, "u")
        return tended(self.settings, plan, "uid", epoch, base)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Return a host."""
    return Host(tmp_path, monkeypatch)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a lock as another process does."""
    lock = open_lock(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def test_first_task_of_a_batch_hands_the_order_on(host: Host) -> None:
    """The order names this host's tables and the newest checkpoint; an older one never replaces it."""
    host.task(5)
    order = read_order(host.folder)
    assert order is not None
    assert (order.base.id, len(order.tables), order.settings) == (5, 3, host.settings)

    host.task(6)
    host.task(5)
    assert (found := read_order(host.folder)) is not None
    assert found.base.id == 6

    host.task(2, epoch=2)
    host.task(7, epoch=1)
    assert (found := read_order(host.folder)) is not None
    assert found.age == (2, 2)


def test_one_task_hears_from_the_follower(host: Host) -> None:
    """The task that hands the order on returns the follower's status with its lag; the others return nothing."""
    host.task(5)
    write(host.folder, STATUS, StandbyStatus(tables=3, oldest_id=4, size_bytes=10))

    report = host.task(6)
    assert report is not None
    assert (report["host"], report["tables"], report["lag"], report["size_bytes"]) == ("here", 3, 2, 10)
    assert host.task(6) is None


def test_follower_is_started_where_none_runs(host: Host) -> None:
    """A task starts the follower unless one holds the lock, or there is nothing to keep on this host."""
    with held(host.folder / LOCK):
        host.task(1)
    assert host.started == 0
    host.task(2)
    assert host.started == 1

    host.name = "elsewhere"
    host.task(3)
    assert host.started == 1
    assert (order := read_order(host.folder)) is not None
    assert order.tables == ()


@pytest.mark.parametrize("plan", [PLAN, None])
def test_nothing_is_ordered_without_need(host: Host, plan: CopyPlan | None) -> None:
    """Without standbys, a checkpoint or a known host there is no order."""
    if plan is None:
        host.task(3, plan=None)
    else:
        host.task(None)
        host.name = None
        host.task(3)

    assert not (host.folder / ORDER).exists()


def test_trouble_with_the_folder_fails_no_task(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    """I16: a folder that cannot be written is logged; a task whose turn another one has goes on at once."""
    with held(host.folder / TURN):
        assert host.task(1) is None
    assert not (host.folder / ORDER).exists()

    (host.folder / TURN).unlink()
    (host.folder / TURN).mkdir()
    assert host.task(2) is None
    assert "keeps no copies" in caplog.text
