"""One Spark session for the tests in this process, and backends whose sidecars are stopped by their pid."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from backend_client import ChangelogStateBackend
from backend_client.service import launcher
from backend_client.service.job_session import JobSession
from backend_client.service.launcher import run_detached
from storage.errors import LostChangesError
from tests.sidecars import end_sidecars
from tools.servers.service.forked import ForkedCommand, can_be_forked
from tools.spark_session import FORKED_WORKERS, SELDOM_POLLED, start_session

# By default a table is materialized at a random time, but tests count objects. A test that needs it enables it.
os.environ.setdefault("DSTL_MATERIALIZATION_ENABLED", "false")

_used_folders: list[Path] = []


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A local session whose tasks may fail a few times, as on a cluster."""
    # Spark's own state stores keep about half a megabyte of each query.
    folder = Path(tempfile.mkdtemp(prefix="dstl-warehouse-"))
    settings = {**FORKED_WORKERS, **SELDOM_POLLED, "driver.memory": "4g", "local.dir": folder}
    settings |= {"locality.wait": "10min"}  # longer than any test: what waits for it is seen
    session = start_session("dstl-tests", settings, master="local[2,4]", folder=folder)
    yield session
    session.stop()
    for folder in _used_folders:  # a task that outlived its test may restart a sidecar
        _stop_sidecars(folder)


@pytest.fixture(scope="module", autouse=True)
def forked_sidecars() -> Iterator[None]:
    """
    Let drivers in this process start sidecars as forks; those that tasks start are processes of their own.

    Not for the session: this process runs other tests in between, of which some look how a sidecar is started.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "run_detached", run_forked)
        yield


def run_forked(command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
    """Start a sidecar, and return its process id."""
    if can_be_forked(command, environment):
        return ForkedCommand(command, environment, log).pid
    return run_detached(command, environment, log)


@pytest.fixture
def local_dir() -> Iterator[Path]:
    """A folder with a path short enough for a Unix socket; sidecars started there are stopped."""
    with folder_of_sidecars() as folder:
        yield folder


@pytest.fixture
def make_local_dir() -> Iterator[Callable[[], Path]]:
    """Return a function that makes such folders, one for each host of a cluster."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(folder_of_sidecars())


@contextmanager
def folder_of_sidecars() -> Iterator[Path]:
    """Yield such a folder."""
    folder = Path(tempfile.mkdtemp(prefix="dstl-"))
    _used_folders.append(folder)
    try:
        yield folder
    finally:
        _stop_sidecars(folder)


def _stop_sidecars(folder: Path) -> None:
    end_sidecars(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def make_backend(tmp_path: Path, local_dir: Path) -> Callable[..., ChangelogStateBackend]:
    """Return a function that makes backends on one storage folder of the test."""

    def make(job: str = "job", storage: str | None = None, **options: Any) -> ChangelogStateBackend:
        url = storage or f"file://{tmp_path / 'store'}"
        return ChangelogStateBackend(url, job=job, **{"local_dir": str(local_dir), "parallelism": 2, **options})

    return make


def stop(pid: int) -> None:
    """End a process that a test started, whatever its state."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@pytest.fixture
def always_materialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an auto-started sidecar request a snapshot whenever changes were logged."""
    for name, value in (("ENABLED", "true"), ("INTERVAL_S", "1"), ("LOG_RATIO", "0"), ("LOG_FLOOR_BYTES", "1")):
        monkeypatch.setenv(f"DSTL_MATERIALIZATION_{name}", value)


@pytest.fixture
def lose_each_checkpoint_once(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Make the first try of each checkpoint fail after the sink, as if a sidecar had died with the batch's sets."""
    lost: set[int] = set()
    complete = JobSession.complete

    def failing(self: JobSession, checkpoint_id: int, plan: Any) -> Any:
        if checkpoint_id not in lost:
            lost.add(checkpoint_id)
            raise LostChangesError("the test lost it")
        return complete(self, checkpoint_id, plan)

    monkeypatch.setattr(JobSession, "complete", failing)
    return lost
