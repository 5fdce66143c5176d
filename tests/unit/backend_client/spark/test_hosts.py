"""Where partitions run as executors come and go; Spark's part is played."""

from __future__ import annotations

from typing import Any

import pytest

from backend_client.spark.places import hosts as places
from backend_client.spark.places.hosts import Hosts
from backend_client.spark.places.seats import Executor, Seats

PARTITIONS = 4


class Application:
    """An application's executors: id and host of each."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *executors: tuple[str, str], keeps_copies: bool = True, cores: int = 1
    ) -> None:
        self.executors = list(executors)
        self.ids: set[str] | None = None
        """The answer about the present executors, if Spark has not recorded them all."""
        monkeypatch.setattr(places, "executor_addresses", lambda _: str([host for _, host in self.executors]))
        monkeypatch.setattr(places, "executor_ids", lambda _: frozenset(self.ids or dict(self.executors)))
        monkeypatch.setattr(places, "executors_at", lambda *_: [(*one, cores) for one in self.executors])
        spark: Any = None
        self.hosts = Hosts(spark, keeps_copies=keeps_copies)

    def seats(self) -> Seats:
        """Look, and return the places."""
        self.hosts.look()
        seats = self.hosts.seats(PARTITIONS)
        assert seats is not None
        return seats

    def places(self) -> set[str | None]:
        """Look, and return all hosts that run a partition or keep a copy."""
        seats = self.seats()
        return {*seats.runners, *seats.keepers}


def test_executor_that_comes_gets_no_partition_before_it_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """All executors of the first look get partitions; a later one does when a task has run on it."""
    application = Application(monkeypatch, ("0", "a"), ("1", "b"))
    assert application.places() == {"a", "b"}
    application.executors.append(("2", "c"))
    assert application.places() == {"a", "b"}
    assert (application.hosts.cold, len(application.hosts.executor_ids)) == ([Executor("2", "c", 1)], 3)
    application.hosts.warmed(application.hosts.cold)
    assert application.places() == {"a", "b", "c"}


def test_executor_in_place_of_a_lost_one_is_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose executor was replaced between two looks is left, as if it were gone, until the new one is warm."""
    application = Application(monkeypatch, ("0", "a"), ("1", "b"), ("2", "c"))
    assert application.places() == {"a", "b", "c"}
    application.executors[1] = ("3", "b")
    assert application.places() == {"a", "c"}
    application.hosts.warmed(application.hosts.cold)
    assert application.places() == {"a", "b", "c"}


def test_executor_with_the_address_of_a_lost_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ports are fixed, only its id tells a new executor; its partitions would go to any executor of two hosts."""
    application = Application(monkeypatch, ("0", "a"), ("1", "b"), ("2", "c"))
    application.places()
    application.ids = {"0", "2", "3"}
    assert application.places() == {"a", "b", "c"}, "Spark has not recorded who has the address"
    application.executors[1] = ("3", "b")
    assert application.places() == {"a", "c"}
    application.hosts.warmed([Executor("3", "b", 1)])
    assert application.places() == {"a", "b", "c"}


def test_cold_executors_get_partitions_where_all_are_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no executor is left that has run a task, those that are there are used."""
    application = Application(monkeypatch, ("0", "a"), ("1", "b"))
    application.places()
    application.executors[:] = [("2", "a"), ("3", "c")]
    assert application.places() == {"a", "c"}


def test_lost_partitions_stay_where_spark_has_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without copies, a lost executor's partitions go on where they ran within the batch: their tables are there."""
    application = Application(monkeypatch, ("0", "a"), ("1", "b"), ("2", "c"), keeps_copies=False)
    before = application.seats()
    assert set(before.keepers) == {None}
    lost = [at for at, runner in enumerate(before.runners) if runner == "b"]
    ran = {at: "c" if runner == "b" else runner for at, runner in enumerate(before.runners)}
    application.hosts.ran({PARTITIONS: ran})
    del application.executors[1]

    after = application.seats()

    assert [at for at, runner in enumerate(after.runners) if runner != before.runners[at]] == lost
    assert {after.runners[at] for at in lost} == {"c"}


def test_host_that_is_back_takes_over_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without copies, a host gets its share when that is decided from outside: first what it had run before."""
    application = Application(monkeypatch, ("0", "a"), ("1", "b"), keeps_copies=False)
    before = application.seats()
    application.executors[1] = ("2", "b")
    assert set(application.seats().runners) == {"a"}
    assert application.hosts.takeover(PARTITIONS) is None, "no executor is warm there"
    application.hosts.warmed(application.hosts.cold)
    assert set(application.seats().runners) == {"a"}
    takeover = application.hosts.takeover(PARTITIONS)
    assert takeover is not None
    assert takeover.after == before

    application.hosts.take_over(PARTITIONS, takeover)

    assert application.seats() == before
    assert application.hosts.takeover(PARTITIONS) is None


def test_partition_that_moved_meanwhile_is_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision from before another loss counts only for partitions that have not moved since."""
    application = Application(monkeypatch, ("0", "a"), ("1", "b"), keeps_copies=False)
    application.seats()
    application.executors.append(("2", "c"))
    application.seats()
    application.hosts.warmed(application.hosts.cold)
    application.seats()
    takeover = application.hosts.takeover(PARTITIONS)
    assert takeover is not None
    (moved,) = takeover.partitions
    lost = takeover.before.runners[moved]
    application.executors[:] = [one for one in application.executors if one[1] != lost]
    other = application.seats().runners[moved]

    application.hosts.take_over(PARTITIONS, takeover)

    assert application.seats().runners[moved] == other
    assert lost not in application.seats().runners


@pytest.mark.parametrize("is_known_before", [False, True])
def test_executor_that_has_run_something_is_not_cold(monkeypatch: pytest.MonkeyPatch, is_known_before: bool) -> None:
    """Spark may give a new executor lost tasks within a batch; then their partitions stay there."""
    application = Application(monkeypatch, ("0", "a"), ("1", "b"), keeps_copies=False)
    before = application.seats()
    if is_known_before:
        application.executors.append(("2", "c"))
        assert application.seats() == before
    application.executors[:] = [("0", "a"), ("2", "c")]
    ran = {at: "a" if host == "a" else "c" for at, host in enumerate(before.runners)}
    application.hosts.ran({PARTITIONS: ran})

    assert application.seats().runners == tuple(ran.values())
    assert application.hosts.cold == []


def test_executor_beside_one_that_has_run_something_is_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks name their host only, so a second or a later executor of a host is cold whatever ran there."""
    application = Application(monkeypatch, ("0", "a"), ("1", "b"), keeps_copies=False)
    before = application.seats()
    application.hosts.ran({PARTITIONS: dict(enumerate(before.runners))})
    application.executors[:] = [("0", "a"), ("2", "a"), ("3", "b")]

    application.seats()

    assert [executor.id for executor in application.hosts.cold] == ["2", "3"]


def test_executors_share_the_partitions_of_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with two executors gets twice the partitions of a host with one."""
    application = Application(monkeypatch, ("0", "a"), ("1", "b"), ("2", "a"), keeps_copies=False, cores=2)
    assert sorted(application.seats().runners) == ["a", "a", "a", "b"]
