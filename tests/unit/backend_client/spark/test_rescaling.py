"""Requests to change an operator's parallelism: what is prepared, and when it counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from backend_client.spark.api.query_jobs import ProgressReports, QueryJobs
from backend_client.spark.scaling import rescaling as module
from backend_client.spark.scaling.rescaling import PASSES, Rescaling
from dstl_service.wire import OperatorInfo
from storage.errors import InvalidInputError
from tests.waiting import wait_until

INFOS = [OperatorInfo("one", 2, "", {}), OperatorInfo("two", 4, "", {})]


class Preparation:
    """Prepares in steps, each of which waits until the test lets it go on."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int]] = []
        self.may_go_on = threading.Semaphore(0)
        self.fails = False

    def __call__(self, operator: str, parallelism: int) -> Iterator[float]:
        for _ in range(2):
            self.may_go_on.acquire()
            self.steps.append((operator, parallelism))
            if self.fails:
                raise OSError("no room")
            yield 0.0

    def go_on(self, steps: int) -> None:
        """Let this many steps run, and wait for them."""
        before = len(self.steps)
        self.may_go_on.release(steps)
        wait_until(lambda: len(self.steps) == before + steps, what="the steps")


def numbers(rescaling: Rescaling, infos: Sequence[OperatorInfo] = INFOS) -> list[int]:
    """Run a batch; return the parallelism of its operators."""
    found = [info.parallelism for info in rescaling.taken(infos)]
    rescaling.batch_ended()
    return found


def switched(rescaling: Rescaling, expected: list[int]) -> None:
    """Wait for a batch with these numbers."""
    wait_until(lambda: numbers(rescaling) == expected, what="the batch that switches")


def test_batch_switches_after_both_passes() -> None:
    """Batches keep their parallelism until all tables were prepared twice; then one switches, for good."""
    prepare = Preparation()
    rescaling = Rescaling(INFOS, 128, prepare)
    rescaling.request("one", 8)
    prepare.go_on(2 * PASSES - 1)
    assert numbers(rescaling) == [2, 4]

    prepare.go_on(1)
    switched(rescaling, [8, 4])

    assert numbers(rescaling) == [8, 4]
    assert rescaling.parallelism == {"one": 8, "two": 4}
    assert prepare.steps == [("one", 8)] * 2 * PASSES


def test_renamed_operator_is_asked_for_by_its_present_name() -> None:
    """The preparation is that of its table, which keeps the first name."""
    prepare = Preparation()
    prepare.may_go_on.release(100)
    renamed = [OperatorInfo("one", 2, "", {}, called="two"), OperatorInfo("two.2", 4, "", {}, called="one")]
    rescaling = Rescaling(renamed, 128, prepare)
    rescaling.follow({"two": 8}, {"two": "a"})
    wait_until(lambda: numbers(rescaling, renamed) == [8, 4], what="the batch that switches")

    assert prepare.steps == [("one", 8)] * 2 * PASSES
    assert rescaling.parallelism == {"two": 8, "one": 4}


def test_later_request_replaces_an_earlier_one() -> None:
    """A preparation that nobody wants any more ends after its step, and its number never counts."""
    prepare = Preparation()
    rescaling = Rescaling(INFOS, 128, prepare)
    rescaling.request("one", 8)
    rescaling.request("one", 3)
    rescaling.request("two", 1)
    prepare.may_go_on.release(100)
    switched(rescaling, [3, 1])

    assert prepare.steps.count(("one", 8)) <= 1
    rescaling.request("two", 6)
    switched(rescaling, [3, 6])


def test_present_number_withdraws_a_request() -> None:
    """Tables that batches use are never prepared: asking for the present number only ends an earlier request."""
    prepare = Preparation()
    rescaling = Rescaling(INFOS, 128, prepare)
    rescaling.request("one", 2)
    rescaling.request("one", 8)
    rescaling.request("one", 2)
    prepare.may_go_on.release(100)
    wait_until(lambda: not any(thread.name == "dstl-rescale" for thread in threading.enumerate()), what="its end")

    assert numbers(rescaling) == [2, 4]
    assert ("one", 2) not in prepare.steps


def test_requests_of_an_administrator_count_once(caplog: pytest.LogCaptureFixture) -> None:
    """A request that each begin repeats counts once; a later request of the program itself then wins."""
    prepare = Preparation()
    prepare.may_go_on.release(100)
    rescaling = Rescaling(INFOS, 128, prepare)
    rescaling.follow({"one": 8, "three": 1}, {"one": "a", "three": "b"})
    switched(rescaling, [8, 4])
    rescaling.request("one", 5)
    rescaling.follow({"one": 8, "three": 1}, {"one": "a", "three": "b"})
    switched(rescaling, [5, 4])

    rescaling.follow({"one": 6}, {"one": "c"})
    switched(rescaling, [6, 4])
    assert caplog.text.count("no stateful operator 'three'") == 1


def test_same_number_may_be_requested_again() -> None:
    """An administrator's second request of a number counts, after a rule has changed it in between."""
    prepare = Preparation()
    prepare.may_go_on.release(100)
    rescaling = Rescaling(INFOS, 128, prepare)
    rescaling.follow({"one": 8}, {"one": "first"})
    switched(rescaling, [8, 4])
    rescaling.request("one", 5)
    switched(rescaling, [5, 4])

    rescaling.follow({"one": 8}, {"one": "second"})

    switched(rescaling, [8, 4])


def test_failed_preparation_does_not_prevent_the_switch() -> None:
    """Tables that could not be prepared are restored by the batch that switches."""
    prepare = Preparation()
    prepare.fails = True
    rescaling = Rescaling(INFOS, 128, prepare)
    rescaling.request("one", 8)
    prepare.go_on(1)

    switched(rescaling, [8, 4])


def test_ended_query_switches_no_more() -> None:
    """After the end of the query, a preparation ends and changes nothing."""
    prepare = Preparation()
    rescaling = Rescaling(INFOS, 128, prepare)
    rescaling.request("one", 8)
    rescaling.close()
    prepare.may_go_on.release(100)
    wait_until(lambda: not any(thread.name == "dstl-rescale" for thread in threading.enumerate()), what="its end")

    assert len(prepare.steps) <= 1
    assert numbers(rescaling) == [2, 4]


@pytest.mark.parametrize(("operator", "parallelism"), [("three", 2), ("one", 0), ("one", 129)])
def test_impossible_requests_are_refused(operator: str, parallelism: int) -> None:
    """An unknown operator, and a parallelism without a key group for each partition, are refused."""
    rescaling = Rescaling(INFOS, 128, Preparation())

    with pytest.raises(InvalidInputError):
        rescaling.request(operator, parallelism)


def test_batches_have_most_of_the_time() -> None:
    """A step is followed by a pause twice as long as its tasks took, however long they waited for cores."""
    begun, ended = list[float](), list[float]()
    waits_s, works_s = 0.4, (0.0, 0.05)

    def prepare(_: str, __: int) -> Iterator[float]:
        for work_s in works_s:
            begun.append(time.monotonic())
            time.sleep(waits_s)
            ended.append(time.monotonic())
            yield work_s

    rescaling = Rescaling(INFOS, 128, prepare)
    rescaling.request("one", 8)
    switched(rescaling, [8, 4])

    pauses = [next_ - end for end, next_ in zip(ended, begun[1:], strict=False)]
    expected = [2 * work_s for work_s in (*works_s, works_s[0])]
    assert all(least <= pause < 1.5 * waits_s for least, pause in zip(expected, pauses, strict=True))


def test_step_begins_when_a_batch_has_ended() -> None:
    """A step would take a core from the batch that runs; after its end, executors wait for the next one."""
    prepare = Preparation()
    prepare.may_go_on.release(100)
    rescaling = Rescaling(INFOS, 128, prepare)
    rescaling.taken(INFOS)
    rescaling.request("one", 8)
    time.sleep(0.2)
    assert not prepare.steps

    rescaling.batch_ended()
    switched(rescaling, [8, 4])


def test_step_does_not_wait_for_a_long_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where batches take long, a step in the middle costs them little, and the preparation ends."""
    monkeypatch.setattr(module, "_BATCH_S_MAX", 0.01)
    prepare = Preparation()
    rescaling = Rescaling(INFOS, 128, prepare)
    rescaling.taken(INFOS)
    rescaling.request("one", 8)
    prepare.go_on(2 * PASSES)
    rescaling.batch_ended()

    switched(rescaling, [8, 4])


def test_unknown_query_is_told() -> None:
    """A slip in a query's name looked like a query without operators."""
    settings, reports, query = SimpleNamespace(), ProgressReports(), SimpleNamespace(name="orders", isActive=True)
    jobs = QueryJobs(settings, reports)  # type: ignore[arg-type]  # not used here
    jobs.started(query, SimpleNamespace(parallelism={"Totals": 4}))  # type: ignore[arg-type]  # what is used of both

    assert jobs.parallelism("orders") == jobs.parallelism(None) == {"Totals": 4}
    for asked in (lambda: jobs.parallelism("oders"), lambda: jobs.rescale("Totals", 2, "oders")):
        with pytest.raises(InvalidInputError, match=r"no running query .* is named 'oders'; those that are: 'orders'"):
            asked()
