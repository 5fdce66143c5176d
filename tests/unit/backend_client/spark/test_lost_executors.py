"""Executors that are lost while a batch runs; Spark's part is played."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from typing import Any

import pytest

from backend_client.spark.places.lost_executors import LostExecutors
from storage.errors import InvalidInputError
from tests.waiting import wait_until


class Application:
    """Has executors 0 and 1 when a batch begins."""

    def __init__(self) -> None:
        self.executor_ids = frozenset({"0", "1"})
        self.alive = self.executor_ids
        self.looks = 0
        self.ended: list[list[str]] = []
        self.is_served = True

    def ids(self) -> frozenset[str]:
        self.looks += 1
        return self.alive

    def end_waits(self, lost: Collection[str]) -> None:
        self.ended.append(sorted(lost))
        if not self.is_served:
            raise InvalidInputError("Spark lacks the interface")


@pytest.fixture
def application() -> Application:
    return Application()


@pytest.fixture
def lost(application: Application) -> Iterator[LostExecutors]:
    hosts: Any = application
    watch = LostExecutors(hosts, application.ids, application.end_waits, every_s=0.001)
    yield watch
    watch.close()
    wait_until(lambda: not threads(), what="the end of the thread")


def threads() -> list[threading.Thread]:
    """Return the threads that watch."""
    return [thread for thread in threading.enumerate() if thread.name == "dstl-lost-executors"]


def test_waits_are_ended_until_the_batch_ends(application: Application, lost: LostExecutors) -> None:
    """One that is lost within a batch is told to Spark again and again; as long as all are there nothing is."""
    with lost.watched():
        wait_until(lambda: application.looks > 2, what="some looks")
        assert application.ended == []
        application.alive = frozenset({"0", "2"})
        wait_until(lambda: len(application.ended) > 2, what="a lost executor that is told")
    assert application.ended[:3] == [["1"]] * 3

    with lost.watched():
        before = application.looks
        wait_until(lambda: application.looks > before + 1, what="the next batch")
    assert len(threads()) == 1


def test_nothing_is_asked_between_batches(application: Application, lost: LostExecutors) -> None:
    """A query that waits for rows costs nothing."""
    with lost.watched():
        wait_until(lambda: application.looks > 0, what="a look")
    asked: list[int] = []

    def is_quiet() -> bool:
        asked.append(application.looks)
        return len(asked) > 20 and asked[-20] == asked[-1]

    wait_until(is_quiet, what="silence")


def test_spark_without_the_interface_is_told_once(
    application: Application, lost: LostExecutors, caplog: pytest.LogCaptureFixture
) -> None:
    """On a Spark that cannot end the waits, one warning says so, and batches go on."""
    application.alive, application.is_served = frozenset({"0"}), False
    with lost.watched():
        wait_until(lambda: not threads(), what="the end of the thread")
    with lost.watched():
        pass
    assert len([line for line in caplog.messages if "lacks the interface" in line]) == 1


def test_partitions_without_places_need_no_watch(application: Application) -> None:
    """Where partitions are not pinned, nobody waits for an executor."""
    watch = LostExecutors(None, application.ids, application.end_waits)
    with watch.watched():
        assert threads() == []
