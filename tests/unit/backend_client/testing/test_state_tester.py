"""Unit tests of processors without Spark: `StateTester`, compared with PySpark's own `TwsTester`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pandas as pd
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.tws_tester import TwsTester

from backend_client import StateTester
from storage.errors import InvalidInputError
from tests.unit.backend_client.testing.purchases import Purchases


class Wider(Purchases):
    """Counts in a wider type, and stores when a key was first seen."""

    count_schema = "first date, n long"

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        first, n = self.count.get() or (None, 0)
        self.count.update((first, n + len(list(rows))))
        yield Row(key=key[0], n=n)


class OfFrames(StatefulProcessor):
    """A processor of the pandas API."""

    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        n = (self.count.get() or (0,))[0] + sum(map(len, rows))
        self.count.update((n,))
        yield pd.DataFrame({"key": [key[0]], "n": [n]})

    def close(self) -> None:
        pass


@pytest.fixture
def tester() -> Iterator[StateTester]:
    """Return a tester of `Purchases` with the initial state of one key."""
    with StateTester(Purchases(), initialStateRow=[("old", Row(n=5))]) as made:
        yield made


def purchases(*amounts: float) -> list[Row]:
    """Return a row for each amount."""
    return [Row(article=f"a{amount:.0f}", amount=amount) for amount in amounts]


def contents(tester: Any, key: str) -> tuple[Any, ...]:
    """Return all state of a key in a tester."""
    return (
        tester.peekValueState("count", key),
        tester.peekListState("amounts", key),
        tester.peekMapState("last", key),
    )


def test_calls_answer_as_those_of_spark(tester: StateTester) -> None:
    """Every method of `TwsTester` exists with the same arguments and results."""
    theirs = TwsTester(Purchases(), initialStateRow=[("old", Row(n=5))])
    for one in (tester, theirs):
        one.updateValueState("count", "ann", (2,))
        one.updateListState("amounts", "bob", [(1.0,), (2.0,)])
        one.updateMapState("last", "bob", {("x",): (1.5,)})

    for key in ("ann", "bob", "old", "ann"):
        assert tester.test(key, purchases(3.0, 4.0)) == theirs.test(key, purchases(3.0, 4.0))
        assert contents(tester, key) == contents(theirs, key)
    for one in (tester, theirs):
        one.deleteState("count", "ann")
        one.deleteState("amounts", "ann")
        one.deleteState("last", "bob")
    for key in ("ann", "bob", "nobody"):
        assert contents(tester, key) == contents(theirs, key)


def test_pandas_processor_is_tested() -> None:
    """A processor of the pandas API receives a frame and yields frames, as with `TwsTester`."""
    frame = pd.DataFrame({"value": ["a", "b"]})
    theirs = TwsTester(OfFrames())
    with StateTester(OfFrames()) as tester:
        for _ in range(2):
            pd.testing.assert_frame_equal(tester.testInPandas("k", frame), theirs.testInPandas("k", frame))


class _Reminders(OfFrames):
    """Sets a timer for each row of the initial state."""

    def init(self, handle: Any) -> None:
        self.handle = handle

    def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: Any) -> None:
        for moment in initialState["at"]:
            self.handle.registerTimer(int(moment))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        yield pd.DataFrame({"key": [key[0]], "at": [expiredTimerInfo.getExpiryTimeInMs()]})


@pytest.mark.parametrize("keys", [["k"], []])
def test_initial_frames_make_the_results_of_timers_frames(keys: list[str]) -> None:
    """Timers that frames of initial state have set fire as a frame, as with `TwsTester`, before any input came."""
    begun = [(key, pd.DataFrame({"at": [10, 20]})) for key in keys]
    theirs = TwsTester(_Reminders(), initialStatePandas=begun, timeMode="ProcessingTime")
    with StateTester(_Reminders(), initialStatePandas=begun, timeMode="ProcessingTime") as tester:
        for moment in (5, 10, 30):
            ours, expected = (cast("pd.DataFrame", one.setProcessingTime(moment)) for one in (tester, theirs))
            pd.testing.assert_frame_equal(ours, expected)


@pytest.mark.parametrize("parallelism", [None, 3])
def test_restore_goes_back_to_checkpoint(tester: StateTester, parallelism: int | None) -> None:
    """I14: changes after the checkpoint are gone, earlier ones are there, with any number of partitions."""
    for number in range(20):
        tester.test(f"key-{number}", purchases(1.0))
    tester.checkpoint()
    before = {key: contents(tester, key) for key in ("key-0", "key-7", "old")}
    for number in range(10, 30):
        tester.test(f"key-{number}", purchases(9.0))
    tester.restore(parallelism=parallelism)

    assert {key: contents(tester, key) for key in before} == before
    assert tester.peekValueState("count", "key-25") is None
    assert tester.test("key-7", purchases(2.0)) == [Row(key="key-7", n=2, total=3.0)]


def test_next_version_of_processor_reads_older_state(tester: StateTester) -> None:
    """Restoring with another version of the processor acts like a query's restart with changed schemas."""
    tester.test("ann", purchases(1.0, 2.0))
    tester.checkpoint()
    tester.restore(processor=Wider())

    assert tester.peekValueState("count", "ann") == (None, 2)
    assert tester.test("ann", purchases(3.0)) == [Row(key="ann", n=2)]
    tester.restore(parallelism=2)  # the newer version again, on the same checkpoint
    assert tester.peekValueState("count", "ann") == (None, 2)
    assert tester.test("ann", purchases(3.0)) == [Row(key="ann", n=2)]
    tester.checkpoint()
    with pytest.raises(InvalidInputError, match="state 'count' of operator 'StateTester': field 'n' was"):
        tester.restore(processor=Purchases())
    assert tester.peekValueState("count", "ann") == (None, 3)


def test_failed_call_changes_nothing(tester: StateTester) -> None:
    """I1: a value that does not fit its schema is an error as in a query, and the state is unchanged."""
    tester.test("ann", purchases(1.0))

    with pytest.raises(InvalidInputError, match=r"amounts\.amount is of type double"):
        tester.test("ann", [*purchases(1.0), Row(article="x", amount="much")])
    assert contents(tester, "ann") == ((1,), [(1.0,)], {("a1",): (1.0,)})


@pytest.mark.parametrize("yielded", [("ann", 1), {"key": "ann", "n": 1}])
def test_results_that_a_query_refuses_are_refused(yielded: Any) -> None:
    """A tuple or a dictionary; nothing is changed."""

    class Careless(Purchases):
        def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Any]:
            yield from super().handleInputRows(key, rows, timerValues)
            yield yielded

    with StateTester(Careless()) as tester:
        with pytest.raises(InvalidInputError, match="it must yield"):
            tester.test("ann", purchases(1.0))
        assert tester.peekValueState("count", "ann") is None


def test_key_may_have_several_columns() -> None:
    """A tuple is a key of several columns; a key whose type cannot be inferred needs a schema."""
    with StateTester(Purchases(), keySchema="name string, day date") as tester:
        assert tester.test(("ann", None), purchases(1.0)) == [Row(key="ann", n=1, total=1.0)]
        with pytest.raises(InvalidInputError, match="has 1 columns, the key's schema 2"):
            tester.test("ann", [])
    with StateTester(Purchases()) as tester, pytest.raises(InvalidInputError, match="pass keySchema"):
        tester.test(None, [])


class Deleting(Purchases):
    """Deletes a state of its previous version."""

    def init(self, handle: Any) -> None:
        handle.deleteIfExists("amounts")
        handle.deleteIfExists("never")
        self.count = handle.getValueState("count", "n int")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        yield Row(n=(self.count.get() or (0,))[0])


def test_deleted_state_is_empty_when_requested_again(tester: StateTester) -> None:
    """A state that one version of a processor deleted is empty when a later version requests it."""
    tester.test("ann", purchases(1.0))
    tester.checkpoint()
    tester.restore(processor=Deleting())
    assert tester.test("ann", []) == [Row(n=1)]
    with pytest.raises(InvalidInputError, match="was not declared"):
        tester.peekListState("amounts", "ann")
    tester.checkpoint()
    tester.restore(processor=Purchases())

    assert contents(tester, "ann") == ((1,), [], {("a1",): (1.0,)})


class Asking(Purchases):
    """Requests a state after deleting it, or the reverse."""

    def __init__(self, delete_first: bool) -> None:
        self.delete_first = delete_first

    def init(self, handle: Any) -> None:
        if self.delete_first:
            handle.deleteIfExists("count")
        super().init(handle)
        if not self.delete_first:
            handle.deleteIfExists("count")


def test_state_deleted_and_requested_is_empty_in_every_batch() -> None:
    """As in Spark, a state that init deletes and then requests is empty in every batch; the reverse is an error."""
    with StateTester(Asking(delete_first=True)) as tester:
        counts = [tester.test("ann", purchases(1.0))[0].n for _ in range(3)]

        assert counts == [1, 1, 1]
        assert len(tester.peekListState("amounts", "ann")) == 3
    with pytest.raises(InvalidInputError, match="gets state 'count' and then deletes it"):
        StateTester(Asking(delete_first=False))


def test_unknown_state_is_named(tester: StateTester) -> None:
    """For a misspelt state name, the error lists the existing names."""
    with pytest.raises(InvalidInputError, match="no state 'cuont'; it declares: count, amounts, last"):
        tester.peekValueState("cuont", "ann")


class Sessions(StatefulProcessor):
    """Counts until a gap of 10 ms in the tester's time; `mode` is the time mode."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.count = handle.getValueState("count", "n long", 100 if self.mode == "ProcessingTime" else None)

    def handleInitialState(self, key: Any, initialState: Row, timerValues: Any) -> None:
        self.count.update((initialState.n,))
        self.handle.registerTimer(5)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        n, now = (self.count.get() or (0,))[0], timerValues.getCurrentProcessingTimeInMs()
        for row in rows:
            n, now = n + 1, row.at
        self.count.update((n,))
        for timer in self.handle.listTimers():
            self.handle.deleteTimer(timer)
        self.handle.registerTimer(now + 10)
        yield Row(key=key[0], n=n)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        n = (self.count.get() or (0,))[0]
        self.count.clear()
        yield Row(key=key[0], ended=expiredTimerInfo.getExpiryTimeInMs(), n=n)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("mode", ["EventTime", "ProcessingTime"])
def test_timers_fire_as_those_of_spark_tester(mode: str) -> None:
    """Timers fire when time advances, late rows are dropped, and the results equal those of `TwsTester`."""
    arguments: dict[str, Any] = {
        "initialStateRow": [("old", Row(n=5))],
        "timeMode": mode,
        "eventTimeExtractor": lambda row: row.at,
    }
    theirs = TwsTester(Sessions(mode), **arguments)
    with StateTester(Sessions(mode), parallelism=2, **arguments) as ours:

        def move(to_ms: int) -> None:
            moved = [
                one.setWatermark(to_ms) if mode == "EventTime" else one.setProcessingTime(to_ms)
                for one in (ours, theirs)
            ]
            assert sorted(moved[0], key=repr) == sorted(moved[1], key=repr)
            assert moved[0]

        for key, moments in (("ann", [1, 2]), ("bob", [12])):
            assert ours.test(key, [Row(at=at) for at in moments]) == theirs.test(key, [Row(at=at) for at in moments])
        move(6)
        move(12)
        assert ours.test("ann", [Row(at=12), Row(at=30)]) == theirs.test("ann", [Row(at=12), Row(at=30)])
        move(25)
        move(45)
        with pytest.raises(InvalidInputError, match="time only moves forward"):
            ours.setWatermark(45) if mode == "EventTime" else ours.setProcessingTime(45)


def test_values_end_with_their_time() -> None:
    """Unlike in `TwsTester`, a value expires when the tester's time passes its end, also after a restore."""
    with StateTester(Sessions("ProcessingTime"), timeMode="ProcessingTime") as tester:
        tester.test("ann", [Row(at=1000)])
        tester.setProcessingTime(99)
        tester.checkpoint()
        tester.restore(parallelism=3)
        assert tester.peekValueState("count", "ann") == (1,)
        tester.setProcessingTime(100)

        assert tester.peekValueState("count", "ann") is None


def test_watermark_is_restored() -> None:
    """A restore sets the watermark back to the checkpoint's, and the timers fired since then fire again."""
    with StateTester(Sessions("EventTime"), timeMode="EventTime", eventTimeExtractor=lambda row: row.at) as tester:
        tester.test("ann", [Row(at=1)])
        tester.checkpoint()
        fired = tester.setWatermark(20)
        tester.restore()

        assert tester.setWatermark(20) == fired == [Row(key="ann", ended=11, n=1)]


def test_wrong_time_mode_is_refused() -> None:
    """The time of another mode cannot be advanced, and event time needs an extractor."""
    with StateTester(Purchases()) as tester, pytest.raises(InvalidInputError, match="needs a StateTester with"):
        tester.setWatermark(1)
    with pytest.raises(InvalidInputError, match="needs eventTimeExtractor"):
        StateTester(Purchases(), timeMode="EventTime")


class _Forgetful(Sessions):
    """A processor without a ``yield``: its methods return None."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Any:
        if any(row.sets_timer for row in rows):
            self.handle.registerTimer(10)
            return iter(())
        return None

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        return None


def test_processor_that_returns_nothing_is_told_what_to_return() -> None:
    """The error names the method and the remedy."""
    remedy = r" returned None: have it yield its results, or return iter\(\(\)\)"
    with StateTester(_Forgetful("ProcessingTime"), timeMode="ProcessingTime") as tester:
        with pytest.raises(InvalidInputError, match=f"handleInputRows{remedy}"):
            tester.test("a", [Row(sets_timer=False)])
        assert tester.test("a", [Row(sets_timer=True)]) == []
        with pytest.raises(InvalidInputError, match=f"handleExpiredTimer{remedy}"):
            tester.setProcessingTime(20)


@pytest.mark.parametrize(
    "sizes", [{"parallelism": 0}, {"parallelism": "2"}, {"maxParallelism": "8"}, {"maxParallelism": 40000}]
)
def test_impossible_sizes_are_told(sizes: dict[str, Any]) -> None:
    """No partition would have a key."""
    with pytest.raises(InvalidInputError, match=r"(?i)parallelism must be a whole number"):
        StateTester(Purchases(), **sizes)
    with StateTester(Purchases()) as tester, pytest.raises(InvalidInputError, match="parallelism must be a whole"):
        tester.restore(parallelism=0)
