"""
Explores schedules of a history: all schedules with few preemptions, and longer ones at random.

As CHESS does (Musuvathi and Qadeer, "Iterative context bounding for systematic testing of multithreaded programs"): an
actor runs until it ends, except where a schedule says otherwise. A change to another actor that could have waited is a
*preemption*; most defects need one or two. A kill is a preemption after which the process never continues. Schedules
with fewer preemptions come first, so that a failure is as short as possible. A schedule that reaches a known state is
cut off there, because everything that follows was explored before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tests.modelcheck.scheduler import DEATH, FAULTS, ON, Actor, Choice, Scheduler, ViolationError

STEPS_MAX = 5_000


class Run:
    """
    One history, ready to start.

    Args:
        scheduler: Holds the actors.
        state: Returns a number that is equal for equal states outside the actors.
        finish: Checks the result when no actor can continue.
    """

    def __init__(self, scheduler: Scheduler, state: Callable[[], int], finish: Callable[[], None]) -> None:
        self.scheduler = scheduler
        self.state = state
        self.finish = finish


@dataclass(slots=True)
class Explored:
    """
    The result of an exploration.

    Args:
        schedules: Number of schedules that were run to their end or to a known state.
        is_exhaustive: Whether these were all within the bound.
        states: Number of different states.
        failure: The first schedule that broke an invariant.
    """

    schedules: int = 0
    is_exhaustive: bool = False
    states: int = 0
    failure: Failure | None = None


@dataclass(slots=True)
class Failure:
    """A schedule that broke an invariant, with what every actor did."""

    schedule: str
    error: BaseException
    trace: list[str] = field(repr=False)

    def __str__(self) -> str:
        return "\n".join([*self.trace, f"{type(self.error).__name__}: {self.error}", f"schedule: {self.schedule!r}"])


def replay(make: Callable[[], Run], schedule: str) -> Failure | None:
    """Run one schedule again, in the form that a failure prints."""
    choices = [Choice.parse(part) for part in schedule.split()]
    return _play(make(), choices, lambda *_: False)


def explore(
    make: Callable[[], Run],
    *,
    preemptions: int,
    kills: int = 0,
    faults: int = 0,
    schedules_max: int = 10_000,
    seed: int = 0,
) -> Explored:
    """
    Run all schedules with at most this number of preemptions and kills, until one breaks an invariant.

    Args:
        make: Starts the history again.
        preemptions: The bound.
        kills: How many of the preemptions may be kills.
        faults: How many of them may be calls that fail.
        schedules_max: If there are more schedules, those with the most preemptions are sampled.
        seed: Seed of the sample.
    """
    chance = random.Random(seed)
    found = Explored()
    seen: dict[int, int] = {}
    waiting: list[list[tuple[Choice, ...]]] = [[] for _ in range(preemptions + 1)]
    waiting[0].append(())
    for cost, level in enumerate(waiting):
        while level:
            if found.schedules >= schedules_max:
                found.states = len(seen)
                return found
            place = chance.randrange(len(level))
            level[place], level[-1] = level[-1], level[place]
            choices = level.pop()
            run = make()
            explorer = _Explorer(run, choices, cost, kills, faults, seen, waiting)
            found.schedules += 1
            found.failure = _play(run, choices, explorer.at)
            if found.failure is not None:
                found.states = len(seen)
                return found
    found.is_exhaustive, found.states = True, len(seen)
    return found


def explore_at_random(
    make: Callable[[], Run], *, schedules: int, seed: int, switch: float = 0.15, kill: float = 0.005
) -> Explored:
    """Run schedules that change or kill the actor at random steps."""
    found = Explored()
    for number in range(schedules):
        chance = random.Random(f"{seed}/{number}")
        run = make()
        made: list[Choice] = []
        found.failure = _play(run, _Drawn(run.scheduler, chance, switch, kill, made), lambda *_: False, made)
        found.schedules += 1
        if found.failure is not None:
            break
    return found


class _Drawn:
    """Choices that are made at random during the run."""

    def __init__(
        self, scheduler: Scheduler, chance: random.Random, switch: float, kill: float, made: list[Choice]
    ) -> None:
        self._scheduler = scheduler
        self._chance = chance
        self._switch = switch
        self._kill = kill
        self._made = made

    def at(self, step: int, current: Actor | None, enabled: Sequence[Actor]) -> Choice | None:
        if current in enabled and self._chance.random() >= self._switch:
            return None
        is_kill = self._chance.random() < self._kill / self._switch
        choice = Choice(step, self._chance.choice(enabled).name, DEATH if is_kill else ON)
        self._made.append(choice)
        return choice


class _Given:
    """Choices of an earlier run."""

    def __init__(self, choices: Iterable[Choice]) -> None:
        self._choices = {choice.step: choice for choice in choices}

    def at(self, step: int, current: Actor | None, enabled: Sequence[Actor]) -> Choice | None:
        return self._choices.get(step)


class _Explorer:
    """Examines each step after the last choice of a schedule for further schedules."""

    def __init__(
        self,
        run: Run,
        choices: tuple[Choice, ...],
        cost: int,
        kills: int,
        faults: int,
        seen: dict[int, int],
        waiting: list[list[tuple[Choice, ...]]],
    ) -> None:
        self._run = run
        self._choices = choices
        self._cost = cost
        self._kills_left = kills - sum(choice.sign == DEATH for choice in choices)
        self._faults_left = faults - sum(choice.sign in FAULTS for choice in choices)
        self._seen = seen
        self._waiting = waiting
        self._from_step = choices[-1].step + 1 if choices else 0

    def at(self, step: int, current: Actor | None, enabled: Sequence[Actor]) -> bool:
        """Record the alternatives at a step; return whether everything that follows was explored before."""
        if step < self._from_step:
            return False
        scheduler = self._run.scheduler
        state = hash(
            (
                self._run.state(),
                tuple(scheduler.seen_by.items()),
                tuple(actor.is_dead for actor in scheduler.actors),
                current.name if current else "",
                self._kills_left,
                self._faults_left,
            )
        )
        if self._seen.get(state, len(self._waiting)) <= self._cost:
            return True
        self._seen[state] = self._cost
        default = _default(current, enabled)
        cost = self._cost + (current in enabled)
        if cost < len(self._waiting):
            self._waiting[cost] += [
                (*self._choices, Choice(step, actor.name)) for actor in enabled if actor is not default
            ]
        if self._kills_left and current in enabled and self._cost + 1 < len(self._waiting):
            self._waiting[self._cost + 1].append((*self._choices, Choice(step, default.name, DEATH)))
        if self._faults_left and self._cost + 1 < len(self._waiting):
            self._waiting[self._cost + 1] += [
                (*self._choices, Choice(step, default.name, sign)) for sign in default.faults
            ]
        return False


def _default(current: Actor | None, enabled: Sequence[Actor]) -> Actor:
    return current if current is not None and current in enabled else enabled[0]


def _play(
    run: Run,
    choices: Iterable[Choice] | _Drawn,
    look: Callable[[int, Actor | None, Sequence[Actor]], bool],
    made: Sequence[Choice] | None = None,
) -> Failure | None:
    """Run a history by a schedule; return the violation."""
    scheduler = run.scheduler
    source = choices if isinstance(choices, _Drawn) else _Given(choices)
    current: Actor | None = None
    error: BaseException | None = None
    try:
        for step in range(STEPS_MAX):
            enabled = [actor for actor in scheduler.actors if actor.is_enabled]
            if not enabled:
                break
            choice = source.at(step, current, enabled)
            if choice is None:
                if look(step, current, enabled):
                    return None
                current = _default(current, enabled)
                scheduler.step(current)
            else:
                chosen = next(actor for actor in scheduler.actors if actor.name == choice.actor)
                if choice.sign == DEATH:
                    scheduler.kill(chosen)
                elif chosen.is_enabled:
                    current = chosen
                    scheduler.step(chosen, choice.sign if choice.sign in FAULTS else "")
            if scheduler.violation is not None:
                break
        else:
            scheduler.violation = ViolationError(f"the run does not come to its end within {STEPS_MAX} steps")
        error = scheduler.violation
        if error is None:
            try:
                run.finish()
            except Exception as raised:  # noqa: BLE001 - it is reported with the schedule
                error = raised
    finally:
        scheduler.close()
    if error is None:
        return None
    shown = choices if made is None else made
    assert not isinstance(shown, _Drawn), "choices that are drawn are in `made`"
    text = " ".join(map(str, shown))
    return Failure(text, error, [*scheduler.trace])
