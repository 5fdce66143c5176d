"""Where partitions run with standbys, as executors come and go; Spark's part is played."""

from __future__ import annotations

from typing import Any

import pytest

from backend_client.spark.standby import standby_hosts
from backend_client.spark.standby.standby_hosts import StandbyHosts

PARTITIONS = 4


class _Query:
    """Somebody who asks; an `object` cannot be referred to weakly."""


QUERY = _Query()


class Application:
    """An application's executors: id and host of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *executors: tuple[str, str]) -> None:
        self.executors = list(executors)
        self.ids: set[str] | None = None
        """Of the executors that are there, if Spark has not recorded them all."""
        monkeypatch.setattr(standby_hosts, "executor_addresses", lambda _: str([host for _, host in self.executors]))
        monkeypatch.setattr(standby_hosts, "executor_ids", lambda _: frozenset(self.ids or dict(self.executors)))
        monkeypatch.setattr(standby_hosts, "executors_at", lambda *_: list(self.executors))
        spark: Any = None
        self.hosts = StandbyHosts(spark, "partition")

    def places(self) -> set[str | None]:
        """Look, and return all hosts that run a partition or keep a copy."""
        self.hosts.look(QUERY, ())
        seats = self.hosts.seats(PARTITIONS)
        assert seats is not None
        return {*seats.runners, *seats.keepers}


def test_executor_that_comes_gets_no_partition_before_it_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """All executors of the first look get partitions; a later one does when a task has run on it."""
    application = Application(monkeypatch, ("0", "a"), ("1", "b"))
    assert application.places() == {"a", "b"}
    application.executors.append(("2", "c"))
    assert application.places() == {"a", "b"}
    assert (application.hosts.cold, application.hosts.executors) == ([("2", "c")], 3)
    application.hosts.warmed([("2", "c")])
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
    application.hosts.warmed([("3", "b")])
    assert application.places() == {"a", "b", "c"}


def test_cold_executors_get_partitions_where_all_are_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no executor is left that has run a task, those that are there are used."""
    application = Application(monkeypatch, ("0", "a"), ("1", "b"))
    application.places()
    application.executors[:] = [("2", "a"), ("3", "c")]
    assert application.places() == {"a", "c"}
