"""A case of the suite, and its verdict: from its answer, and from its effect on the service."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from loadtest.attack.harness.raw import Answer
from loadtest.attack.harness.target import State


class Target(Protocol):
    """The observed target, during a case and after it: an `Attacked` service, which has the documentation."""

    def begin(self) -> None: ...
    def answers(self, within_s: float) -> bool: ...
    def settle(self) -> None: ...
    def state(self, known: tuple[str, ...]) -> State: ...


RSS_GROWTH_MAX = 96 << 20
"""Memory that a case may cost the service; more than it may hold for requests in progress."""
NEIGHBOUR_MS_MAX = 5_000.0
"""Longest duration of another job's batch meanwhile."""


@dataclass(frozen=True, slots=True)
class Case:
    """
    One attack. `run` returns the defect found, or None.

    `known` are jobs that it may create; new objects of other jobs are a miss.
    """

    group: str
    name: str
    run: Callable[[Any], str | None]
    known: tuple[str, ...] = ()
    rss_growth_max: int = RSS_GROWTH_MAX
    neighbour_ms_max: float = NEIGHBOUR_MS_MAX
    is_short: bool = True
    """Whether the short form includes it."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a case, with the service's state while it ran; without `misses` it held."""

    case: Case
    seconds: float
    state: State
    misses: list[str] = field(default_factory=list)


def judge(case: Case, target: Target, subject: Any = None) -> Result:
    """Run a case against a service and return its result; `subject` replaces the service as its argument."""
    target.begin()
    started, misses = time.monotonic(), []
    try:
        found = case.run(target if subject is None else subject)
    except Exception as error:  # noqa: BLE001 - after any error the case did not hold
        found = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - started
    alive = target.answers(5.0)
    target.settle()
    state = target.state(case.known)
    if found:
        misses.append(found)
    if not alive:
        misses.append("the service does not answer any more")
    if state.rss_growth_bytes > case.rss_growth_max:
        misses.append(f"memory grew by {state.rss_growth_bytes >> 20} MiB, {case.rss_growth_max >> 20} are allowed")
    if state.neighbour_ms_max > case.neighbour_ms_max:
        misses.append(f"a batch of another job took {state.neighbour_ms_max:.0f} ms")
    if state.neighbour_errors:
        misses.append(f"{state.neighbour_errors} batches of another job failed: {state.neighbour_error}")
    if state.stored:
        misses.append(f"{len(state.stored)} objects were stored, for example {state.stored[0]}")
    return Result(case, seconds, state, misses)


def refused(answer: Answer) -> str | None:
    """Return a defect if a request was not refused."""
    return None if answer.is_refused else _told(answer, "was not refused")


def no_bug(answer: Answer) -> str | None:
    """Return a defect if a request met a bug, or got no answer on an open connection."""
    if answer.status >= 500 and answer.status != 503:
        return _told(answer, "met a bug")
    return None if answer.statuses or answer.is_closed else _told(answer, "got no answer")


def with_status(answer: Answer, *statuses: int) -> str | None:
    """Return a defect if an answer has another status."""
    return None if answer.status in statuses else _told(answer, f"should be one of {statuses}")


def _told(answer: Answer, what: str) -> str:
    return f"{what}: {answer.data[:120]!r}{', closed' if answer.is_closed else ''}"
