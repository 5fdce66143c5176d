"""
The parts of a pause, by Spark's event log: until it knows of the loss, repeated work, and the work of the batch.

No I/O. Times are milliseconds since the epoch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

PHASES = ("detection", "resubmission", "rows to partitions", "operator and output", "in jobs", "between jobs")
"""The parts of a pause: until Spark knows of the loss; until a task runs after that; tasks that send rows to
partitions, and other tasks; Spark's own work in jobs; the driver's work between jobs, and the wait for the trigger."""


@dataclass(frozen=True, slots=True)
class Task:
    """A finished attempt of a task."""

    stage: int
    host: str
    executor: str
    began_ms: float
    ended_ms: float
    reason: str
    writes_shuffle: bool


@dataclass(slots=True)
class EventLog:
    """The events of one application that tell of losses and of work."""

    removed_ms: list[tuple[float, str]] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    stages: list[tuple[float, float, int, str]] = field(default_factory=list)
    """Submission, completion, number and name."""
    jobs: list[tuple[float, float]] = field(default_factory=list)

    def take(self, lines: Iterable[str]) -> None:
        """Take the log of one application; an incomplete last line is left out."""
        begun: dict[int, float] = {}
        for line in lines:
            if line.endswith("\n"):
                self._take(json.loads(line), begun)

    def _take(self, event: Mapping[str, Any], begun: dict[int, float]) -> None:
        kind = str(event["Event"]).removeprefix("SparkListener")
        if kind == "ExecutorRemoved":
            self.removed_ms.append((event["Timestamp"], str(event["Executor ID"])))
        elif kind == "JobStart":
            begun[event["Job ID"]] = event["Submission Time"]
        elif kind == "JobEnd":
            self.jobs.append((begun.get(event["Job ID"], event["Completion Time"]), event["Completion Time"]))
        elif kind == "StageCompleted":
            found = event["Stage Info"]
            times = found.get("Submission Time", 0), found.get("Completion Time", 0)
            self.stages.append((*times, found["Stage ID"], found["Stage Name"]))
        elif kind == "TaskEnd":
            found = event["Task Info"]
            reason = event.get("Task End Reason") or {}
            self.tasks.append(
                Task(
                    event["Stage ID"],
                    found["Host"],
                    found["Executor ID"],
                    found["Launch Time"],
                    found["Finish Time"],
                    str(reason.get("Reason", "")),
                    str(event.get("Task Type")) == "ShuffleMapTask",
                )
            )


def parts_ms(log: EventLog, lost_ms: float, until_ms: float) -> dict[str, float]:
    """
    Divide the time from a loss to the next output into `PHASES`, each moment into the first that it belongs to.

    Args:
        log: The application's events.
        lost_ms: The moment of the loss.
        until_ms: The moment of the output.
    """
    noticed = [at for at, _ in log.removed_ms if lost_ms <= at <= until_ms]
    noticed += [
        task.ended_ms for task in log.tasks if task.reason != "Success" and lost_ms <= task.ended_ms <= until_ms
    ]
    noticed_ms = min(noticed, default=lost_ms)
    later = [task for task in log.tasks if task.ended_ms > noticed_ms and task.began_ms < until_ms]
    resumed_ms = min((task.began_ms for task in later if task.began_ms >= noticed_ms), default=noticed_ms)
    found = dict.fromkeys(PHASES, 0.0)
    found["detection"] = noticed_ms - lost_ms
    found["resubmission"] = resumed_ms - noticed_ms
    maps = [(task.began_ms, task.ended_ms) for task in later if task.writes_shuffle]
    others = [(task.began_ms, task.ended_ms) for task in later if not task.writes_shuffle]
    found["rows to partitions"] = covered_ms(maps, resumed_ms, until_ms)
    in_tasks = covered_ms([*maps, *others], resumed_ms, until_ms)
    found["operator and output"] = in_tasks - found["rows to partitions"]
    in_jobs = covered_ms([*log.jobs, *maps, *others], resumed_ms, until_ms)
    found["in jobs"] = in_jobs - in_tasks
    found["between jobs"] = until_ms - resumed_ms - in_jobs
    return found


def covered_ms(spans: Iterable[tuple[float, float]], since_ms: float, until_ms: float) -> float:
    """Return how much of a time is covered by any of the spans."""
    total, reached = 0.0, since_ms
    for began, ended in sorted(spans):
        first, last = max(began, reached), min(ended, until_ms)
        if last > first:
            total, reached = total + last - first, last
    return total
