"""Histories of `sink_kit` in which other slots, other sinks and checks come between a publisher's records."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace

import pyarrow as pa

from backend_client.sinks.protocol import Marker, Slot
from backend_client.testing.sink_history import APART, CHECK, MARKER, ONCE, ORDER, History
from storage.validation import NAME_CHARS_MAX


def other_slots(history: History) -> None:
    """Another slot, another sink of the job, and another job's sink of this name, have published nothing."""
    history.publish(history.marker(0), [0])
    own = history.slots[0]
    others = (replace(own, sink=f"{own.sink}-other"), replace(own, job_uid=uuid.uuid4().hex))
    for other in others:
        history.kit.sink.check(history.kit.columns, [other])
    for other in (*others, history.slots[2]):
        publisher = history.kit.sink.open(other)
        history.expect(MARKER, None, publisher.last_published())
        publisher.close()


def names_that_begin_alike(history: History) -> None:
    """Output of others, whose slot, sink or job has a name that begins like this one's, is not this slot's."""
    kit, own = history.kit, history.slots[1]
    others = (replace(own, number=10), replace(own, sink=f"{own.sink}1"), replace(own, job_uid=f"{own.job_uid}1"))
    for number, other in enumerate(others):
        kit.sink.check(kit.columns, [replace(other, number=slot) for slot in range(other.number + 1)])
        publisher = kit.sink.open(other)
        marker = Marker(other.job_uid, other.number, history.marker(7 + number).checkpoint)
        publisher.publish([kit.batch(history.numbers(2 * number + 1))], marker)
        publisher.close()
    history.expect(MARKER, None, history.last(1))
    history.publish(history.marker(0, slot=1), [7])
    history.expect(MARKER, history.marker(0, slot=1), history.last(1))
    history.expect(ONCE, [1, 3, 5, 7], sorted(history.seen()))


def names_that_are_nearly_equal(history: History) -> None:
    """Output of a sink whose name differs in case only, or at the end of the longest name, is not this one's."""
    own = history.slots[0]
    long = own.sink.ljust(NAME_CHARS_MAX - 1, "n")
    for number, (name, other) in enumerate(((own.sink, own.sink.upper()), (f"{long}1", f"{long}2"))):
        slot = replace(own, sink=name)
        for each in (slot, replace(own, sink=other)):
            history.kit.sink.check(history.kit.columns, [each])
        _publish(history, replace(own, sink=other), 4 * number)
        publisher = history.kit.sink.open(slot)
        history.expect(MARKER, None, publisher.last_published())
        publisher.close()
        _publish(history, slot, 4 * number + 2)
    history.expect(ONCE, [0, 2, 4, 6], sorted(history.seen()))


def records_in_no_order(history: History) -> None:
    """Records come in an order of their own, which is not that of their values."""
    history.publish(history.marker(0), [4, 0], [2])
    if history.kit.in_order:
        history.expect(ORDER, [4, 0, 2], history.seen())


def slots_at_the_same_time(history: History) -> None:
    """A slot publishes while another one is reading its records."""
    _within_records(history, APART, lambda: history.publish(history.marker(0, slot=1), [1], [3]))
    history.expect(MARKER, history.marker(0, slot=1), history.last(1))
    history.expect(APART, [0, 1, 2, 3], sorted(history.seen()))


def slots_opened_at_the_same_time(history: History) -> None:
    """A slot is opened while another one is reading its records."""
    _within_records(history, APART, lambda: history.kit.sink.open(history.slots[1]).close())
    history.expect(APART, [0, 2], sorted(history.seen()))


def checked_within_its_records(history: History) -> None:
    """A query is checked while a publisher is reading its records."""
    _within_records(history, CHECK, lambda: history.kit.sink.check(history.kit.columns, history.slots))
    history.expect(CHECK, [0, 2], sorted(history.seen()))


def _within_records(history: History, promise: str, act: Callable[[], None]) -> None:
    def records() -> Iterator[pa.RecordBatch]:
        yield history.kit.batch(history.numbers(0))
        act()
        yield history.kit.batch(history.numbers(2))

    publisher = history.kit.sink.open(history.slots[0])
    history.expect_success(promise, lambda: publisher.publish(records(), history.marker(0)))
    publisher.close()
    history.expect(MARKER, history.marker(0), history.last())


def _publish(history: History, slot: Slot, number: int) -> None:
    publisher = history.kit.sink.open(slot)
    marker = Marker(slot.job_uid, slot.number, history.marker(number).checkpoint)
    publisher.publish([history.kit.batch(history.numbers(number))], marker)
    publisher.close()
