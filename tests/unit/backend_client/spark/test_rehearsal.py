"""Executors load what a failure needs before a task fails; Spark's part is played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from backend_client.spark.failover import rehearsal
from backend_client.spark.failover.rehearsal import rehearse


def application(master: str, number: str) -> Any:
    """Return a session of an application."""
    context = SimpleNamespace(master=master, applicationId=number, defaultParallelism=3)
    return SimpleNamespace(sparkContext=context)


def test_each_application_rehearses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One task for each core of a cluster fails inwardly; an error of that job disturbs nobody."""
    ranges: list[tuple[int, ...]] = []

    def session(spark: Any) -> Any:
        def fail(*numbers: int) -> Any:
            ranges.append(numbers)
            raise RuntimeError("no executor")

        return SimpleNamespace(sparkContext=spark.sparkContext, range=fail)

    monkeypatch.setattr(rehearsal, "own_session", session)
    begun = [rehearse(application("spark://h:1", "a")), rehearse(application("local-cluster[2,1,1024]", "b"))]
    for thread in begun:
        assert thread is not None
        thread.join(30)
    assert ranges == [(0, 3, 1, 3)] * 2
    assert rehearse(application("spark://h:1", "a")) is None
    assert rehearse(application("local[2]", "c")) is None
