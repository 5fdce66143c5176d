"""Which executors are given up when hosts fall silent."""

from __future__ import annotations

import pytest

from backend_client.spark.failover.host_watch import LOOKS, HostWatch, is_driver_cut_off
from storage.errors import UnavailableError
from tests.waiting import wait_until

EXECUTORS = [("1", "127.0.0.1"), ("2", "127.0.0.2"), ("3", "127.0.0.2"), ("4", "[::1]")]


class Cluster:
    """Silent hosts and executors, and what was removed."""

    def __init__(self) -> None:
        self.silent: list[str] = []
        self.executors: list[tuple[str, str]] | None = EXECUTORS
        self.removed: list[str] = []
        self.restarted: list[str] = []
        self.watch = HostWatch(
            lambda: self.silent, lambda: self.executors, lambda one, _: self.removed.append(one), self.restart
        )

    def look(self) -> None:
        """Look until a host that is silent all the time is given up."""
        for _ in range(LOOKS):
            self.watch.look()

    def restart(self, group: str, _: str) -> int:
        """Note which jobs' tasks run again."""
        self.restarted.append(group)
        return 1


def test_silent_host_loses_its_executors_once() -> None:
    """All executors of the host are given up, those that come there meanwhile are not, and later ones are again."""
    cluster = Cluster()
    cluster.look()
    assert cluster.removed == []

    cluster.silent = ["127.0.0.2"]
    cluster.look()
    cluster.look()
    assert cluster.removed == ["2", "3"]

    cluster.silent = []
    cluster.look()
    cluster.silent = ["::1", "127.0.0.9"]
    cluster.look()
    assert cluster.removed == ["2", "3", "4"]


def test_host_that_is_silent_for_a_moment_keeps_its_executors() -> None:
    """A few looks decide nothing, and those of an earlier silence do not count."""
    cluster = Cluster()
    some = [["127.0.0.2"]] * (LOOKS - 1)
    for silent in (*some, [], *some):
        cluster.silent = silent
        cluster.watch.look()
    assert cluster.removed == []


def test_driver_that_is_cut_off_keeps_its_executors(caplog: pytest.LogCaptureFixture) -> None:
    """All hosts fall silent, one after the other: none is given up, which is said once; one that stays silent is."""
    cluster = Cluster()
    for silent in (["127.0.0.1"], ["127.0.0.1", "127.0.0.2"], ["127.0.0.1", "127.0.0.2", "::1"]):
        cluster.silent = silent
        cluster.watch.look()
    cluster.look()
    assert (cluster.removed, [record.levelname for record in caplog.records]) == ([], ["WARNING"])

    cluster.silent = ["::1"]
    cluster.look()
    assert cluster.removed == ["4"]


@pytest.mark.parametrize(
    ("hosts", "silent", "is_cut_off"),
    [(1, 1, False), (2, 1, False), (2, 2, True), (3, 2, True), (4, 2, False), (10, 9, True), (10, 8, False)],
)
def test_which_side_is_cut_off(hosts: int, silent: int, is_cut_off: bool) -> None:
    """Several hosts at once, and at most one left, are not likely to be lost by themselves."""
    assert is_driver_cut_off(hosts, silent) == is_cut_off


def test_unknown_executors_are_asked_for_again() -> None:
    """A host that falls silent while Spark has not recorded a new executor yet is looked at once more."""
    cluster = Cluster()
    cluster.silent, cluster.executors = ["127.0.0.1"], None
    cluster.look()
    cluster.executors = EXECUTORS
    cluster.look()
    assert cluster.removed == ["1"]


def test_running_tasks_do_not_wait_for_a_silent_host() -> None:
    """The batch's tasks run again once when a host with executors falls silent; for another host they do not."""
    cluster = Cluster()
    cluster.silent = ["127.0.0.9"]
    cluster.watch.begin("the run")
    cluster.watch.end()
    cluster.look()
    assert cluster.restarted == []

    cluster.silent = ["127.0.0.1"]
    cluster.look()
    cluster.look()
    assert cluster.restarted == ["the run"]


def test_executor_that_cannot_be_given_up_keeps_no_other() -> None:
    """An error for one executor leaves neither the others of a silent host nor the running tasks waiting."""
    cluster = Cluster()
    removed: list[str] = []

    def remove(executor: str, _: str) -> None:
        removed.append(executor)
        raise RuntimeError("no answer")

    watch = HostWatch(lambda: ["127.0.0.2"], lambda: EXECUTORS, remove, cluster.restart)
    watch.begin("the run")
    watch.end()
    for _ in range(LOOKS):
        watch.look()
    assert removed == ["2", "3"]
    assert cluster.restarted == ["the run"]


def test_watch_outlives_errors_until_it_ends() -> None:
    """A coordinator that does not answer, or Spark's own error, costs one look; the end closes what is used."""
    errors: list[Exception] = [UnavailableError("it starts"), RuntimeError("Spark stops")]
    seen: list[str] = []
    closed: list[bool] = []

    def silent() -> list[str]:
        if errors:
            raise errors.pop()
        seen.append("asked")
        return []

    watch = HostWatch(silent, list, lambda *_: pytest.fail("silent"), lambda *_: 0, lambda: closed.append(True))
    watch.begin(None)
    watch.begin(None)
    wait_until(lambda: len(seen) > 1, what="a look after the errors")
    watch.end()
    wait_until(lambda: closed == [True], what="the end of the watch")
