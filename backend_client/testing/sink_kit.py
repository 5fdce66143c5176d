"""
A conformance kit for sinks: publishes through one as queries do, kills and suspends publishers, and reads what is seen.

It needs real processes, and a sink whose system runs. Each history uses a sink name of its own, so a system may be
used for any number of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread

import pyarrow as pa

from backend_client.testing.sink_history import (
    APART,
    ATOMIC,
    CHECK,
    CHILD_TIMEOUT_S,
    COUNT,
    FENCED,
    FEW,
    LAST,
    MARKER,
    ONCE,
    ORDER,
    WORKS,
    BrokenPromise,
    History,
    SinkUnderTest,
)
from backend_client.testing.sink_openings import opened_while_it_is_opened
from backend_client.testing.sink_slots import (
    checked_within_its_records,
    names_that_are_nearly_equal,
    names_that_begin_alike,
    other_slots,
    records_in_no_order,
    slots_at_the_same_time,
    slots_opened_at_the_same_time,
)
from backend_client.testing.sink_steps import SteppedPublishers, chosen
from storage.errors import FencedError, UnavailableError

__all__ = [
    "APART",
    "ATOMIC",
    "CHECK",
    "COUNT",
    "FENCED",
    "LAST",
    "MARKER",
    "ONCE",
    "ORDER",
    "WORKS",
    "BrokenPromise",
    "SinkKit",
]

_LONG = tuple((10**17 + number, 10**17 + number) for number in range(20))
"""As many earlier branches as a marker has, with the longest names."""

_KILL_STEPS = ("opened", "between records", "all records read", "published")
_KILLS, _SUSPENSIONS = 12, 8
_MANY, _KILLS_WITH_MANY = 6_000, 8
"""More records than a system is usually sent in one piece."""
_BLOCKED_S = 0.5


@dataclass(frozen=True, slots=True)
class SinkKit(SinkUnderTest):
    """A sink, with all that the kit needs to know of it; see `SinkUnderTest`."""

    def run(self) -> list[BrokenPromise]:
        """Run all histories; return what was broken, nothing for a sink that keeps its promises."""
        return list(self.broken())

    def broken(self) -> Iterator[BrokenPromise]:
        """Run all histories as `run` does, and yield what is broken after each: who stops reading stops them."""
        histories: list[Callable[[History], None]] = [
            _plain,
            _rewound,
            _ids_that_come_again,
            other_slots,
            names_that_begin_alike,
            names_that_are_nearly_equal,
            _slots_side_by_side,
            slots_at_the_same_time,
            slots_opened_at_the_same_time,
            _checked_again,
            checked_within_its_records,
            records_in_no_order,
            _equal_records,
            _records_that_fail,
            _older_publisher,
            _older_publisher_within_its_records,
            _older_publisher_without_records,
            _older_publisher_is_quicker,
            _suspended,
            _suspended_between_steps,
            _suspended_while_it_opens,
            opened_while_it_is_opened,
            _killed_between_steps,
            *(_killed(step) for step in _KILL_STEPS),
            _killed_with_many_records,  # a reader would read all of these after it
        ]
        broken: list[BrokenPromise] = []
        with SteppedPublishers() as publishers:
            for number, history in enumerate(histories):
                made = History(self, number, history.__doc__ or "", broken, publishers)
                told = len(broken)
                self.sink.check(self.columns, made.slots)
                try:
                    history(made)
                except Exception as error:  # noqa: BLE001 - the sink is the user's
                    made.note(error)
                yield from broken[told:]


def _plain(history: History) -> None:
    """Two slots publish several checkpoints, one of them without records."""
    history.expect(MARKER, None, history.last())
    history.publish(history.marker(0), [0, 2], [4])
    history.publish(history.marker(0, slot=1), [1, 3])
    history.expect(MARKER, [history.marker(0), history.marker(0, slot=1)], [history.last(), history.last(1)])
    history.publish(history.marker(1))
    history.expect(MARKER, history.marker(1), history.last())
    history.publish(history.marker(2), [6])
    history.expect(MARKER, history.marker(2), history.last())
    history.expect_records(0, 2, 4, 1, 3, 6)


def _rewound(history: History) -> None:
    """After a rewind the first marker of the new branch is found, though nothing was published with it."""
    history.publish(history.marker(5), [0])
    first = replace(history.marker(3, branch=9), earlier=_LONG)
    history.publish(first)
    history.expect(MARKER, first, history.last())
    history.publish(history.marker(4, branch=9), [2])
    history.expect_records(0, 2)


def _ids_that_come_again(history: History) -> None:
    """
    After a rewind checkpoints have the ids of those that were given up, whose records stay.

    A publisher that stood still meanwhile does not take one for the other.
    """
    history.publish(history.marker(5), [0])
    older = history.kit.sink.open(history.slots[0])
    history.publish(history.marker(4, branch=9))
    history.publish(history.marker(5, branch=9), [2])
    history.expect_fenced(lambda: older.publish([history.kit.batch(history.numbers(4))], history.marker(6)))
    older.close()
    history.expect(MARKER, history.marker(5, branch=9), history.last())
    history.expect_records(0, 2)


def _slots_side_by_side(history: History) -> None:
    """Two slots are open at the same time, and both publish."""
    first, second = (history.kit.sink.open(slot) for slot in history.slots[:2])
    for number, publisher in ((1, second), (0, first)):
        batch, marker = history.kit.batch(history.numbers(number)), history.marker(0, slot=number)
        history.expect_success(APART, partial(publisher.publish, [batch], marker))
        publisher.close()
    history.expect_records(0, 1)


def _checked_again(history: History) -> None:
    """A query is checked, as at each start, while a publisher of the slot stands still, and is checked again."""
    history.publish(history.marker(0), [0])
    running = history.kit.sink.open(history.slots[0])
    history.kit.sink.check(history.kit.columns, history.slots)
    batch = history.kit.batch(history.numbers(2))
    history.expect_success(CHECK, lambda: running.publish([batch], history.marker(1)))
    running.close()
    history.kit.sink.check(history.kit.columns, history.slots)
    history.expect(CHECK, history.marker(1), history.last())
    history.expect_records(0, 2)


def _equal_records(history: History) -> None:
    """Records of one checkpoint, of the next ones and of another slot are equal."""
    if not history.kit.keeps_equal:
        return
    history.publish(history.marker(0), [0, 0], [0])
    for checkpoint_id in (1, 2):
        history.publish(history.marker(checkpoint_id), [0])
    history.publish(history.marker(0, slot=1), [0])
    history.expect(ONCE, [0] * 6, history.seen())


def _records_that_fail(history: History) -> None:
    """The log fails while records are read from it: nothing is visible, and a later try publishes all."""

    def records() -> Iterator[pa.RecordBatch]:
        yield history.kit.batch(history.numbers(0))
        raise UnavailableError("the log does not answer")

    with closing(history.kit.sink.open(history.slots[0])) as publisher, suppress(UnavailableError):
        publisher.publish(records(), history.marker(0))
        history.expect(ATOMIC, "UnavailableError", "success")
    history.expect_records()
    history.expect(MARKER, None, history.last())
    history.publish(history.marker(0), [0], [2])
    history.expect_records(0, 2)


def _older_publisher(history: History) -> None:
    """A publisher that stood still goes on after a newer one has published."""
    older = history.kit.sink.open(history.slots[0])
    history.publish(history.marker(0), [0])
    batch = history.kit.batch(history.numbers(2))
    history.expect_fenced(lambda: older.publish([batch], history.marker(0)))
    older.close()
    history.expect_records(0)
    history.expect(MARKER, history.marker(0), history.last())


def _older_publisher_within_its_records(history: History) -> None:
    """A newer publisher publishes while an older one is reading its records."""
    newer = iter([history.marker(0)])

    def records() -> Iterator[pa.RecordBatch]:
        yield history.kit.batch(history.numbers(2))
        for marker in newer:  # once, however often the older one tries
            history.publish(marker, [0])
        yield history.kit.batch(history.numbers(4))

    older = history.kit.sink.open(history.slots[0])
    history.expect_fenced(lambda: older.publish(records(), history.marker(0)))
    older.close()
    history.expect_records(0)


def _older_publisher_without_records(history: History) -> None:
    """A publisher that stood still has only a marker to publish, after a newer one has published more."""
    history.publish(history.marker(0), [0])
    older = history.kit.sink.open(history.slots[0])
    history.publish(history.marker(2), [2])
    history.expect_fenced(lambda: older.publish([], history.marker(1)))
    older.close()
    history.expect(MARKER, history.marker(2), history.last())
    history.expect_records(0, 2)


def _older_publisher_is_quicker(history: History) -> None:
    """A publisher opens the slot and reads the marker; before it publishes, an older one tries."""
    older, newer = (history.kit.sink.open(history.slots[0]) for _ in range(2))
    for publisher in (older, newer):
        history.expect(MARKER, None, publisher.last_published())
    for publisher in (older, newer):
        with suppress(FencedError, UnavailableError):  # either may win
            publisher.publish([history.kit.batch(history.numbers(0))], history.marker(0))
        publisher.close()
    history.expect(MARKER, history.marker(0), history.last())
    history.expect_records(0)


def _suspended(history: History) -> None:
    """A process is suspended within its records, and resumes after a newer publisher."""
    process = history.publishers.suspended(history.publishing(0), "between records")
    try:
        history.publish(history.marker(0), [10])
    finally:
        history.publishers.resumed(process)
    history.expect_records(10)
    history.expect(MARKER, history.marker(0), history.last())


def _killed_between_steps(history: History) -> None:
    """A publisher is killed at any step after it has read its records."""
    _kill(history, _KILLS)


def _killed_with_many_records(history: History) -> None:
    """A publisher of many records is killed at any step after it has read them."""
    _kill(history, _KILLS_WITH_MANY, _MANY)


def _kill(history: History, kills: int, size: int = FEW) -> None:
    steps = history.publishers.steps(history.publishing(0, size))
    for number, step in enumerate(chosen(steps, kills), 1):
        history.publishers.killed(history.publishing(number, size), step)
        if history.last() != history.marker(number):
            history.expect(ATOMIC, history.published(number, size), sorted(history.seen()))
            history.complete(number, size)
        if not _completed(history, number, size):
            return


def _suspended_between_steps(history: History) -> None:
    """A process is suspended at any step after it has read its records, and resumes after a newer publisher."""
    _suspend(history, is_opening=False)


def _suspended_while_it_opens(history: History) -> None:
    """A process is suspended at any step until it has read the marker, and resumes after a newer publisher."""
    _suspend(history, is_opening=True)


def _suspend(history: History, *, is_opening: bool) -> None:
    steps = history.publishers.steps(replace(history.publishing(0), is_opening=is_opening))
    for number, step in enumerate(chosen(steps, _SUSPENSIONS), 1):
        suspended = replace(history.publishing(number), is_opening=is_opening)
        process = history.publishers.suspended(suspended, step)
        newer = Thread(target=history.complete, args=(number,))
        newer.start()
        newer.join(_BLOCKED_S)  # the older one may have locked what the newer one needs
        history.publishers.resumed(process)
        newer.join(CHILD_TIMEOUT_S)
        if not _completed(history, number):
            return


def _completed(history: History, number: int, size: int = FEW) -> bool:
    """Look for a checkpoint and its records; return whether no promise was broken so far."""
    history.expect(MARKER, history.marker(number), history.last())
    history.expect_records(*history.published(number + 1, size))
    return not history.is_broken


def _killed(step: str) -> Callable[[History], None]:
    def run(history: History) -> None:
        is_killed = history.publishers.killed(history.publishing(0), step)
        history.expect("the publisher can be killed", True, is_killed)
        seen = sorted(history.seen())  # before another publisher opens the slot, which may tidy up
        found = history.last()
        history.expect(ATOMIC, [] if found is None else [0, 2, 4], seen)
        if found is None:
            history.expect(ATOMIC, [], history.seen())
            history.expect(ATOMIC, False, step == "published")
            history.publish(history.marker(0), [0, 2], [4])
        history.expect(MARKER, history.marker(0), history.last())
        history.expect_records(0, 2, 4)

    run.__doc__ = f"A publisher is killed: {step}."
    return run
