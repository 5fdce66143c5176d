"""The explorer itself: it finds defects with the fewest preemptions, and prints how to reproduce them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from storage.errors import NotFoundError
from tests.modelcheck.cluster import JOB, CheckedCluster, History
from tests.modelcheck.code_under_check import Process, finish, first_checkpoints, made_small
from tests.modelcheck.explorer import Run, explore, explore_at_random, replay
from tests.modelcheck.scheduler import Choice, ViolationError


def increments(count: int) -> Callable[[], Run]:
    """Return a history in which several actors read a number, and write it back increased by one."""

    def make() -> Run:
        cluster = CheckedCluster()
        cluster.store.put("a/number", b"0")

        def increment() -> None:
            cluster.store.put("a/number", str(int(cluster.store.get("a/number")) + 1).encode())

        def check() -> None:
            if cluster.store.get("a/number") != str(count).encode():
                raise ViolationError("an increment is lost")

        for number in range(count):
            cluster.actor(f"actor-{number}", increment)
        return Run(cluster.scheduler, cluster.state, check)

    return make


def test_lost_update_needs_one_preemption() -> None:
    """Without preemptions all schedules run and none fails; with one preemption an update is lost."""
    without = explore(increments(2), preemptions=0)
    found = explore(increments(2), preemptions=1)

    assert without.failure is None
    assert without.is_exhaustive
    assert found.failure is not None
    assert isinstance(found.failure.error, ViolationError)


@pytest.mark.parametrize("keys", [("a/one", "a/two"), ("a/one", "a/one")])
def test_each_end_is_checked_once(keys: tuple[str, str]) -> None:
    """Schedules that end alike are checked once, and different ends each: if the last put wins, there are two."""
    ends: list[dict[str, tuple[bytes, int]]] = []

    def begin(cluster: CheckedCluster) -> None:
        for number, key in enumerate(keys):
            cluster.actor(f"actor-{number}", partial(cluster.store.put, key, b"%d" % number))

    make = History(lambda _: None, begin, lambda cluster: ends.append(cluster.store.objects())).maker()
    explored = explore(make, preemptions=2)

    assert explored.schedules > 1
    assert len(ends) == (1 if keys[0] != keys[1] else 2)


def test_failure_is_replayed() -> None:
    """The schedule of a failure fails again with the same steps, and the schedule without choices does not."""
    failure = explore(increments(3), preemptions=1).failure
    assert failure is not None

    again = replay(increments(3), failure.schedule)

    assert again is not None
    assert again.trace == failure.trace
    assert "actor-0: get a/number" in str(again)
    assert replay(increments(3), "") is None


def test_random_schedules_find_it_too() -> None:
    """A schedule that was drawn at random is printed in the same form."""
    failure = explore_at_random(increments(2), schedules=1000, seed=5).failure

    assert failure is not None
    assert replay(increments(2), failure.schedule) is not None


def test_seed_decides() -> None:
    """The same seed gives the same schedule."""
    one, other = (explore_at_random(increments(3), schedules=1000, seed=6).failure for _ in range(2))

    assert one is not None
    assert other is not None
    assert one.schedule == other.schedule


def test_kill_leaves_the_rest_undone() -> None:
    """An actor that dies makes no further call, and the others continue."""
    failure = replay(increments(2), "2!actor-0")

    assert failure is not None
    assert failure.trace[-4:] == [
        "  2 actor-0 dies before: put a/number",
        "  3 actor-1: begins",
        "  4 actor-1: get a/number",
        "  5 actor-1: put a/number",
    ]
    assert explore(increments(2), preemptions=0, kills=1).failure is None


@pytest.mark.parametrize("text", ["13:table", "7!driver", "8~driver", "9?driver", "10&driver"])
def test_choice_is_read_as_it_is_written(text: str) -> None:
    """The printed form of a schedule can be parsed."""
    assert str(Choice.parse(text)) == text


def broken(cluster: CheckedCluster, harm: Callable[[CheckedCluster], None]) -> None:
    """Damage a job with three checkpoints, and check it."""
    with made_small():
        first_checkpoints(cluster, 3)
        harm(cluster)
        finish(cluster)


def newest_object(cluster: CheckedCluster) -> str:
    """Return the key of the newest segment object."""
    return max(info.key for info in cluster.store.list(f"{JOB}/segments/"))


def test_sound_job_passes() -> None:
    """An unchanged job breaks no invariant."""
    broken(CheckedCluster(), lambda cluster: None)


def test_missing_object_is_noticed() -> None:
    """An object of a retained checkpoint that is deleted is a violation at once."""
    with pytest.raises(ViolationError, match="is gone"):
        broken(CheckedCluster(), lambda cluster: cluster.store.delete([newest_object(cluster)]))


def test_object_that_a_fork_misses_is_noticed() -> None:
    """An object that only a fork needs, which its parent deletes, is a violation at once."""

    def harm(cluster: CheckedCluster) -> None:
        key = newest_object(cluster)
        Process(cluster).fork("fork")
        cluster.oracles.pop(JOB)  # the parent itself would miss it, too
        cluster.store.delete([key])

    with pytest.raises(ViolationError, match="is gone"):
        broken(CheckedCluster(), harm)


def test_what_a_fork_leaves_is_noticed() -> None:
    """A savepoint that nobody needs, of a fork that was never created, is a violation if it stays."""

    def harm(cluster: CheckedCluster) -> None:
        Process(cluster).jobs().make_savepoint("fork-at-2-mine", None)

    with pytest.raises(ViolationError, match="a fork has left savepoints"):
        broken(CheckedCluster(), harm)


def test_lost_checkpoint_is_noticed() -> None:
    """A reported checkpoint that vanishes with its manifest is a violation."""

    def harm(cluster: CheckedCluster) -> None:
        newest = cluster.oracle.newest
        assert newest is not None
        cluster.store.delete([f"{JOB}/checkpoints/{newest.id:020d}.{newest.generation:06d}.json"])

    with pytest.raises(ViolationError, match="nobody's past"):
        broken(CheckedCluster(), harm)


def test_other_content_is_noticed() -> None:
    """A checkpoint without the content that its driver wrote is a violation."""

    def harm(cluster: CheckedCluster) -> None:
        newest = cluster.oracle.newest
        assert newest is not None
        cluster.oracle.expect(newest.segments[0].entry.id, {b"another": b"table"})

    with pytest.raises(ViolationError, match="other content"):
        broken(CheckedCluster(), harm)


def test_garbage_that_stays_is_noticed() -> None:
    """A segment object without a reference that no collection deletes is a violation."""

    def harm(cluster: CheckedCluster) -> None:
        cluster.store.on_delete = lambda key: cluster.store.put(key, b"it is there again")
        cluster.store.put(f"{JOB}/segments/host/garbage.seg", b"garbage")

    with pytest.raises(ViolationError, match="garbage stays"):
        broken(CheckedCluster(), harm)


def test_refused_actor_is_no_violation() -> None:
    """An actor whose request is refused ends, and the history continues."""
    cluster = CheckedCluster()
    cluster.actor("refused", lambda: cluster.store.get("a/missing"))
    cluster.actor("other", lambda: cluster.store.put("a/put", b""))

    assert replay(lambda: Run(cluster.scheduler, cluster.state, lambda: None), "") is None

    assert isinstance(cluster.scheduler.actors[0].error, NotFoundError)
    assert cluster.store.objects()["a/put"][0] == b""
