"""
Copies of tables on a standby's disk: a real sidecar, real tables, and followers in processes of their own.

A failure means that a copy is not what its table is, that a task had to wait for a copy or to restore a table although
there was one, or that a follower outlives its job.
"""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from backend_client.service.job_session import connect_as
from backend_client.settings import BackendSettings
from backend_client.standby.copy_client import CopyClient
from backend_client.standby.follower import Follower
from backend_client.standby.orders import LOCK, ORDER, Order, TableName, read_status, write
from backend_client.standby.tending import follower_folder, start_follower
from backend_client.table.state_table import StateTable
from storage.key_groups import key_group_range
from storage.private_folder import open_lock
from tests.integration.backend_client.materializing_job import ALWAYS, MAX_PARALLELISM, MaterializingJob, running_job
from tests.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

PARALLELISM = 2


@dataclass
class Standby:
    """A second host, as far as a local folder goes: it has the sidecar of the first one."""

    job: MaterializingJob
    settings: BackendSettings
    pids: list[int] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """The follower's folder."""
        return follower_folder(self.settings, "uid")

    @property
    def tables(self) -> tuple[TableName, ...]:
        """All tables of the job."""
        ranges = (key_group_range(at, self.job.parallelism, MAX_PARALLELISM) for at in range(self.job.parallelism))
        return tuple(TableName("op", key_groups) for key_groups in ranges)

    def order(self) -> Order:
        """Return the order to keep copies of all tables at the newest checkpoint, and write it for a follower."""
        assert self.job.base is not None
        order = Order(self.settings, "uid", self.job.epoch, self.job.base, self.tables)
        write(self.folder, ORDER, order)
        return order

    def follower(self) -> Follower:
        """Return a follower in this process."""
        return Follower(self.folder, connect_as(CopyClient, self.settings, 1.0, may_start=False))

    def start(self) -> int:
        """Start a follower as a task does; return its process id."""
        lock = open_lock(self.folder / LOCK)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.pids.append(start_follower(self.folder, lock))
        finally:
            os.close(lock)
        return self.pids[-1]

    def place(self, name: TableName) -> Path:
        """Return the folder of a table."""
        return Path(self.settings.private_folder("tables", "uid", name.operator, name.key_groups.to_text()))

    @contextmanager
    def opened(self, name: TableName) -> Iterator[StateTable]:
        """Open a table as a task does."""
        table = StateTable.open(self.place(name))
        try:
            yield table
        finally:
            table.close()

    def content(self) -> dict[bytes, bytes]:
        """Return the content of all copies, which must be at the newest checkpoint."""
        found: dict[bytes, bytes] = {}
        for name in self.tables:
            with self.opened(name) as table:
                assert self.job.base is not None
                assert table.version == self.job.base.to_text()
                found.update(table.items())
        return found


@pytest.fixture
def standby(tmp_path: Path) -> Iterator[Standby]:
    """Return the standby of a job; its followers are killed by their process ids."""
    with (
        running_job(tmp_path, ALWAYS | {"DSTL_MATERIALIZATION_INTERVAL_S": "3600"}, PARALLELISM) as job,
        tempfile.TemporaryDirectory(prefix="dstl-") as local,
    ):
        service = job.sidecar.address
        settings = BackendSettings("file:///unused", "job", service=service, local_dir=local, standby_replicas=1)
        found = Standby(job, settings)
        try:
            yield found
        finally:
            for pid in found.pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                wait_until(lambda: not is_running(pid), what="the follower's end")  # noqa: B023


def is_running(pid: int) -> bool:
    """Say whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_copies_follow_the_checkpoints(standby: Standby) -> None:
    """
    I1, I14: copies equal the tables; a later step reads the changes since, not the state.

    The sidecar asks no copy for a snapshot, and does not count it among restores.
    """
    job, follower = standby.job, standby.follower()
    for _ in range(3):
        job.batch(keys=300, value_bytes=1000)
    restored = job.metric("dstl_restored_bytes_total")
    for _ in range(PARALLELISM):  # a round makes one missing copy
        follower.round(standby.order())
    first = read_status(standby.folder)

    assert standby.content() == job.state
    assert first is not None
    assert (first.tables, first.missing, first.oldest_id) == (PARALLELISM, 0, job.base.id if job.base else None)
    assert first.size_bytes > 0

    for _ in range(3):
        job.batch(keys=2)
    follower.round(standby.order())
    second = read_status(standby.folder)

    assert standby.content() == job.state
    assert second is not None
    assert second.read_bytes - first.read_bytes < first.read_bytes / 10
    assert job.metric("dstl_copied_bytes_total") == second.read_bytes
    assert job.metric("dstl_restored_bytes_total") - restored < first.read_bytes / 2


def test_task_always_gets_the_copy(standby: Standby) -> None:
    """While a follower works, tasks that open the table get the copy, never another slot, and soon."""
    job = standby.job
    job.batch(keys=2000, value_bytes=1000)
    standby.order()
    standby.start()
    name = standby.tables[0]
    wait_until(lambda: (found := read_status(standby.folder)) is not None and found.tables == PARALLELISM)
    waited_s: list[float] = []
    ended = threading.Event()

    def ask() -> None:
        while not ended.wait(0.05):  # a follower that finds the table in use comes back a second later
            began_s = time.monotonic()
            with standby.opened(name) as table:
                assert table.version is not None, "a task got an empty table"
            waited_s.append(time.monotonic() - began_s)

    tasks = threading.Thread(target=ask)
    tasks.start()
    try:
        for _ in range(8):
            job.batch(keys=300, value_bytes=1000)
            base = standby.order().base
            wait_until(lambda: (found := read_status(standby.folder)) is not None and found.oldest_id == base.id)  # noqa: B023
    finally:
        ended.set()
        tasks.join()

    assert len(waited_s) > 20
    assert not standby.place(name).joinpath("1.lock").exists()
    assert max(waited_s) < 1.5
    assert standby.content() == job.state


def test_copy_that_is_being_made_gives_way(standby: Standby) -> None:
    """A task that wants a table whose copy is being made gets an empty one at once; the copy is made later."""
    job, follower = standby.job, standby.follower()
    job.batch(keys=5000, value_bytes=1000)
    order, name = standby.order(), standby.tables[0]
    got: list[str | None] = []

    def open_table() -> None:
        with standby.opened(name) as table:
            got.append(table.version)

    task = threading.Thread(target=open_table)
    client = follower._client
    parts = client.restore

    @contextmanager
    def slow(*args: object, **options: object) -> Iterator[object]:
        with parts(*args, **options) as frames:  # type: ignore[arg-type]

            def each() -> Iterator[object]:
                for number, frame in enumerate(frames):
                    if number == 1 and not task.ident:
                        task.start()
                        wait_until(lambda: (standby.place(name) / "0.lock").read_bytes() == b"w")
                    yield frame

            yield each()

    client.restore = slow  # type: ignore[method-assign, assignment]
    follower.round(order)
    task.join()
    client.restore = parts  # type: ignore[method-assign]

    assert got == [None]
    for _ in range(PARALLELISM):
        follower.round(order)
    assert standby.content() == job.state


def test_table_in_use_is_left_alone(standby: Standby) -> None:
    """A table that a task holds, or has brought beyond the order's checkpoint, is neither waited for nor taken back."""
    job, follower = standby.job, standby.follower()
    job.batch()
    old = standby.order()
    with standby.opened(standby.tables[0]):
        follower.round(old)
        follower.round(old)
    assert set(follower.copies) == {standby.tables[1]}

    job.batch()
    newer = standby.follower()
    for _ in range(PARALLELISM):
        newer.round(standby.order())
    read = newer._client.read_bytes
    again = standby.follower()
    for _ in range(PARALLELISM):
        again.round(old)

    assert standby.content() == job.state
    assert read > 0
    assert again._client.read_bytes == 0


def test_copies_beyond_the_limit_are_not_made(standby: Standby) -> None:
    """A host keeps as many copies as `standby_bytes_max` allows, and says how many are missing."""
    standby.job.batch(keys=2000, value_bytes=1000)
    follower = standby.follower()
    follower.round(standby.order())
    first = read_status(standby.folder)
    assert first is not None
    assert (first.tables, first.missing) == (1, 1)

    standby.settings = replace(standby.settings, standby_bytes_max=first.size_bytes + 100_000)
    for _ in range(3):
        follower.round(standby.order())

    assert (found := read_status(standby.folder)) is not None
    assert (found.tables, found.missing) == (1, 1)

    standby.settings = replace(standby.settings, standby_bytes_max=first.size_bytes // 2)
    follower.round(standby.order())

    assert (found := read_status(standby.folder)) is not None
    assert (found.tables, found.missing, found.size_bytes) == (0, 2, 0)


def test_follower_ends_with_its_job(standby: Standby) -> None:
    """A follower whose orders are gone ends, and leaves neither its lock nor its status behind."""
    standby.job.batch()
    standby.order()
    pid = standby.start()
    wait_until(lambda: (found := read_status(standby.folder)) is not None and found.tables == PARALLELISM)
    niceness = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[16])
    assert niceness == min(19, os.nice(0) + 10), "its priority is not low"

    (standby.folder / ORDER).unlink()

    wait_until(lambda: not is_running(pid), what="the follower's end")
    assert not (standby.folder / LOCK).exists()
    assert read_status(standby.folder) is None


def test_follower_ends_without_a_sidecar(standby: Standby) -> None:
    """A follower whose sidecar does not answer for 20 s ends; it starts none."""
    standby.job.batch()
    order = standby.order()
    standby.job.sidecar.stop()
    now_s = [0.0]

    def pause(seconds: float) -> None:
        now_s[0] += seconds

    client = connect_as(CopyClient, standby.settings, 0.0, may_start=False)
    Follower(standby.folder, client, lambda: now_s[0], pause).run(order)

    assert 20 < now_s[0] < 30


def test_follower_ends_with_its_sidecar(standby: Standby) -> None:
    """A follower whose sidecar was started again, however fast, ends: it may run the code of before an upgrade."""
    standby.job.batch()
    standby.order()
    pid = standby.start()
    wait_until(lambda: (found := read_status(standby.folder)) is not None and found.tables == PARALLELISM)

    standby.job.sidecar.restart()
    standby.job.batch()
    standby.order()

    wait_until(lambda: not is_running(pid), what="the follower's end")
    assert not (standby.folder / LOCK).exists()


def test_follower_ends_at_an_order_of_another_version(standby: Standby) -> None:
    """A follower that does not understand its order ends, and leaves its place to one of the order's version."""
    standby.job.batch()
    standby.order()
    pid = standby.start()
    wait_until(lambda: (found := read_status(standby.folder)) is not None and found.tables == PARALLELISM)

    (standby.folder / ORDER).write_text("{}")

    wait_until(lambda: not is_running(pid), what="the follower's end")
    assert not (standby.folder / LOCK).exists()
