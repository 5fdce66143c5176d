"""
A model check of the real code: writing, naming and deleting, in every order that a few pauses can produce.

Everything that a retained checkpoint or a savepoint names stays, whichever process is paused or dies before any call to
the store, and whichever clock is wrong; a driver can always continue; nothing that was reported is lost. The
invariants are in `oracle`, the histories in `histories`, and the calls of the code in `code_under_check`.

``DSTL_MODELCHECK_SCHEDULES=N`` sets how many schedules of each history are run (a third of that of the long one, a
quarter of those with a sink or a fork),
``DSTL_MODELCHECK_SEED=N`` which of them. A failure prints what every actor did and the schedule.
``DSTL_MODELCHECK_SCHEDULE='13:table 20!driver'`` runs that one alone, in the history that ``-k`` chooses: at step 13
the table continues, at step 20 the driver dies. With ``~``, ``?`` and ``&`` its call fails: without effect, after its
effect, or before an effect that comes at any later time.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from tests.modelcheck.code_under_check import made_small
from tests.modelcheck.explorer import Failure, explore, explore_at_random, replay
from tests.modelcheck.histories import HISTORIES
from tests.support.seeds import chosen_seed

pytestmark = [
    pytest.mark.timeout(900),
    # A process that dies leaves calls that are never executed.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]

SCHEDULES = int(os.environ.get("DSTL_MODELCHECK_SCHEDULES", "240"))
SCHEDULE = os.environ.get("DSTL_MODELCHECK_SCHEDULE")
SEED = chosen_seed("DSTL_MODELCHECK_SEED")
SHARES = {"output": 4, "fork": 4}
"""Schedules with a publisher, or of two jobs, are long: only a part of them is run."""
PREEMPTIONS = 3
KILLS = 1
FAULTS = 2
FAULT_SHARE = 8
"""Schedules in which calls fail are an eighth as many."""


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    """Adapt the code to many short runs."""
    with made_small():
        yield


@pytest.fixture(autouse=True)
def no_remains() -> Iterator[None]:
    """Collect the calls that are never executed while their warnings are ignored, not in another test."""
    yield
    gc.collect()


def report(name: str, failure: Failure | None) -> None:
    """Fail with everything that is needed to run a schedule again."""
    if failure is not None:
        how = f"DSTL_MODELCHECK_SCHEDULE={failure.schedule!r} pytest tests/modelcheck -k {name}"
        pytest.fail(f"{failure}\nrepeat with {how}", pytrace=False)


def check(name: str, schedules: int, **limits: int) -> None:
    """Explore some schedules of a history, or its share of them, within limits; or run the one that is chosen."""
    make = HISTORIES[name].maker()
    if SCHEDULE is not None:
        report(name, replay(make, SCHEDULE))
        return
    schedules //= SHARES.get(name.partition("_")[0], 1)
    explored = explore(make, preemptions=PREEMPTIONS, schedules_max=schedules, seed=SEED, **limits)
    print(f"{name}: {explored.schedules} schedules, {explored.states} states, seed {SEED}")
    report(name, explored.failure)


@pytest.mark.parametrize("name", [name for name in HISTORIES if name != "everything"])
def test_history_keeps_what_is_needed(name: str) -> None:
    """With three pauses, one of them forever, kept state can be restored, and a driver continues (I3, I4, I11, I12)."""
    check(name, SCHEDULES, kills=KILLS)


@pytest.mark.parametrize("name", [name for name in HISTORIES if name != "everything"])
def test_history_survives_calls_that_fail(name: str) -> None:
    """The same if two calls to the store fail without effect, after their effect, or long before it (I3-I5, I11)."""
    check(name, SCHEDULES // FAULT_SHARE, faults=FAULTS)


def test_everything_keeps_what_is_needed() -> None:
    """Long schedules drawn at random, with rewinds, savepoints, compactions and wrong clocks (I3, I4, I11, I12)."""
    make = HISTORIES["everything"].maker()
    if SCHEDULE is not None:
        report("everything", replay(make, SCHEDULE))
        return
    explored = explore_at_random(make, schedules=max(1, SCHEDULES // 3), seed=SEED)
    print(f"everything: {explored.schedules} schedules, seed {SEED}")
    report("everything", explored.failure)
