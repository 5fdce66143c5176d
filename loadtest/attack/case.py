"""What a case of the suite is, and how it is judged: by its answer, and by what it did to the service behind it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from loadtest.attack.raw import Answer
from loadtest.attack.target import Attacked, State

RSS_GROWTH_MAX = 96 << 20
"""What a case may cost the service in memory; above what it may hold for requests that are under way."""
NEIGHBOUR_MS_MAX = 5_000.0
"""How long a batch of another job may take beside it."""


@dataclass(frozen=True, slots=True)
class Case:
    """
    One attack. `run` returns what it has found wrong, None if nothing.

    `known` are jobs that it creates as anybody may; objects of others are a miss.
    """

    group: str
    name: str
    run: Callable[[Any], str | None]
    known: tuple[str, ...] = ()
    rss_growth_max: int = RSS_GROWTH_MAX
    neighbour_ms_max: float = NEIGHBOUR_MS_MAX
    is_short: bool = True
    """Whether it is in the short form, too."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a case, with the state of the service while it ran; no `misses`: it held."""

    case: Case
    seconds: float
    state: State
    misses: list[str] = field(default_factory=list)


def judge(case: Case, target: Attacked, subject: Any = None) -> Result:
    """Run a case against a service and say what it has missed; `subject` is what it gets instead of the service."""
    target.begin()
    started, misses = time.monotonic(), []
    try:
        found = case.run(target if subject is None else subject)
    except Exception as error:  # noqa: BLE001 - whatever it is, the case did not hold
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
    """Find it wrong that a request was not refused."""
    return None if answer.is_refused else _told(answer, "was not refused")


def no_bug(answer: Answer) -> str | None:
    """Find it wrong that a request met a bug, or was left without an answer on an open connection."""
    if answer.status >= 500 and answer.status != 503:
        return _told(answer, "met a bug")
    return None if answer.statuses or answer.is_closed else _told(answer, "got no answer")


def with_status(answer: Answer, *statuses: int) -> str | None:
    """Find it wrong that an answer has another status."""
    return None if answer.status in statuses else _told(answer, f"should be one of {statuses}")


def _told(answer: Answer, what: str) -> str:
    return f"{what}: {answer.data[:120]!r}{', closed' if answer.is_closed else ''}"
