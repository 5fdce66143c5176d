"""
The reasons of a batch's failed jobs, while Spark records them.

A failure means that a loss which the user's function has caught goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from backend_client.spark.private import job_record
from backend_client.spark.private.job_record import JobRecord

RDD = 5


class Jobs:
    """Spark's scheduler and record: job 0 fails in stage 7, the others succeed; all end before the first look."""

    def __init__(self, recorded: Sequence[int]) -> None:
        self._recorded = iter(recorded)
        """How many jobs are recorded at each look-up; all after the last one."""
        self.begun = 0

    def numTotalJobs(self) -> int:
        return self.begun

    def jobIdToActiveJob(self) -> Any:
        return SimpleNamespace(contains=lambda _: False)

    def getJobInfo(self, number: int) -> Any:
        if number >= next(self._recorded, self.begun):
            return None
        status = "SUCCEEDED" if number else "FAILED"
        return SimpleNamespace(status=lambda: SimpleNamespace(toString=lambda: status), stageIds=lambda: [7 + number])

    def statusStore(self) -> Any:
        def attempt(stage: int) -> Any:
            return SimpleNamespace(
                failureReason=lambda: f"lost in {stage}",
                rddIds=lambda: SimpleNamespace(contains=lambda rdd: rdd == RDD),
            )

        return SimpleNamespace(lastStageAttempt=attempt)


@pytest.mark.parametrize(
    "recorded", [[], [0], [0, 0], [0, 1, 1], [0, 0, 0, 1, 2], [1, 3], [0, 3], [0, 0, 3], [2, 2, 2]]
)
def test_jobs_that_are_recorded_between_two_looks_are_not_forgotten(
    recorded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I18: whenever Spark records the jobs of a batch, one after the other, the failed one is found."""
    jobs = Jobs(recorded)
    monkeypatch.setattr(job_record, "_of", lambda _: (jobs, jobs, jobs))
    found = JobRecord(SimpleNamespace(sparkContext=None), SimpleNamespace(id=lambda: RDD))  # type: ignore[arg-type]
    jobs.begun = 3
    looks = 0
    while found.is_behind():
        looks += 1
        assert looks < 9

    assert [*found.failures()] == ["lost in 7"]
