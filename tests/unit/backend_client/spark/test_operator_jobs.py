"""Which jobs are given up when a host falls silent, and what becomes of their batch."""

from __future__ import annotations

import pytest

from backend_client.spark.driver.repeating import helps_to_repeat
from backend_client.spark.failover.operator_jobs import OperatorJobs
from storage.errors import LostChangesError


def test_running_job_is_given_up_and_its_batch_repeated() -> None:
    """I18: the error of the cancelled job becomes one for which the whole batch is executed again."""
    cancelled: list[str] = []
    jobs = OperatorJobs(cancelled.append)

    def run() -> None:
        with jobs.running():
            assert jobs.give_up("the run", "a host has fallen silent")
            raise RuntimeError("the job was cancelled")

    with pytest.raises(LostChangesError, match="a host has fallen silent") as found:
        run()
    assert helps_to_repeat(found.value)
    assert cancelled == ["the run"]


def test_other_jobs_are_left_alone() -> None:
    """Without an operator's job nothing is cancelled; one that ended by itself counts, and a later error stays."""
    cancelled: list[str] = []
    jobs = OperatorJobs(cancelled.append)
    assert not jobs.give_up("the run", "why")
    assert cancelled == []
    with jobs.running():
        assert jobs.give_up("the run", "why")
    assert not jobs.give_up("the run", "why")
    with pytest.raises(RuntimeError, match="of the user"), jobs.running():
        raise RuntimeError("an error of the user")
    assert cancelled == ["the run"]
