"""
Explores schedules of a history: all with few preemptions, and longer ones at random.

As CHESS does (Musuvathi and Qadeer, "Iterative context bounding for systematic testing of multithreaded programs"): an
actor runs until it ends, except where a schedule says otherwise. A change to another actor that could have waited is a
*preemption*; most defects need one or two. A kill is a preemption after which the process never goes on. Schedules with
fewer preemptions come first, so what is found is as short as it can be. A schedule that comes to a state which was seen
before is cut off there: what follows was seen as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tests.modelcheck.scheduler import Actor, Choice, Scheduler, ViolationError

STEPS_MAX = 5_000


class Run:
    """
    One history, ready to begin.

    Args:
        scheduler: Has the actors.
        state: Returns a number that is equal for equal states outside the actors.
        finish: Checks what is left when nobody can go on.
    """

    def __init__(self, scheduler: Scheduler, state: Callable[[], int], finish: Callable[[], None]) -> None:
        self.scheduler = scheduler
        self.state = state
        self.finish = finish


@dataclass(slots=True)
class Explored:
    """
    What an exploration did.

    Args:
        schedules: How many were run to their end or to a state that was seen before.
        is_exhaustive: Whether these were all within the bound.
        states: How many different ones there were.
        failure: Of the first schedule that broke an invariant.
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
    """Run one schedule again, as a failure prints it."""
    choices = [Choice.parse(part) for part in schedule.split()]
    return _play(make(), choices, lambda *_: False)


def explore(
    make: Callable[[], Run], *, preemptions: int, kills: int = 0, schedules_max: int = 10_000, seed: int = 0
) -> Explored:
    """
    Run all schedules with at most so many preemptions and kills among them, until one breaks an invariant.

    Args:
        make: Begins the history anew.
        preemptions: The bound.
        kills: How many of the preemptions may be kills.
        schedules_max: Of more schedules than this, those with the most preemptions are drawn at random.
        seed: Decides which.
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
            explorer = _Explorer(run, choices, cost, kills, seen, waiting)
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
    """Run schedules that change the actor, or kill it, at any step by chance."""
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
    """Choices that are made by chance as the run goes on."""

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
        choice = Choice(step, self._chance.choice(enabled).name, self._chance.random() < self._kill / self._switch)
        self._made.append(choice)
        return choice


class _Given:
    """Choices that were made before."""

    def __init__(self, choices: Iterable[Choice]) -> None:
        self._choices = {choice.step: choice for choice in choices}

    def at(self, step: int, current: Actor | None, enabled: Sequence[Actor]) -> Choice | None:
        return self._choices.get(step)


class _Explorer:
    """Looks at each step behind the last choice of a schedule for further schedules."""

    def __init__(
        self,
        run: Run,
        choices: tuple[Choice, ...],
        cost: int,
        kills: int,
        seen: dict[int, int],
        waiting: list[list[tuple[Choice, ...]]],
    ) -> None:
        self._run = run
        self._choices = choices
        self._cost = cost
        self._kills_left = kills - sum(choice.is_kill for choice in choices)
        self._seen = seen
        self._waiting = waiting
        self._from_step = choices[-1].step + 1 if choices else 0

    def at(self, step: int, current: Actor | None, enabled: Sequence[Actor]) -> bool:
        """Note what else could happen at a step; say whether all that follows was seen before."""
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
            self._waiting[self._cost + 1].append((*self._choices, Choice(step, default.name, is_kill=True)))
        return False


def _default(current: Actor | None, enabled: Sequence[Actor]) -> Actor:
    return current if current is not None and current in enabled else enabled[0]


def _play(
    run: Run,
    choices: Iterable[Choice] | _Drawn,
    look: Callable[[int, Actor | None, Sequence[Actor]], bool],
    made: Sequence[Choice] | None = None,
) -> Failure | None:
    """Run a history by a schedule; return what went wrong."""
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
                if choice.is_kill:
                    scheduler.kill(chosen)
                elif chosen.is_enabled:
                    current = chosen
                    scheduler.step(chosen)
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
