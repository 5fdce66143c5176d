"""Parts of restores that are read ahead: their order, errors, memory, and readers that are in each other's way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from dstl_service.restore.read_ahead import PART_BYTES_MAX, PARTS_EACH, SMALL_EACH, Part, ReadAhead
from storage.errors import UnavailableError
from tests.waiting import wait_until


class Parts:
    """Parts that wait for the test, and how many were begun."""

    def __init__(self, count: int, size_bytes: int = 1) -> None:
        self.count = count
        self.size_bytes = size_bytes
        self.begun: list[int] = []
        self.threads: set[str] = set()
        self.may_end = threading.Event()

    def __iter__(self) -> Iterator[Part[int]]:
        for number in range(self.count):
            yield Part(partial(self._read, number), self.size_bytes)

    def _read(self, number: int) -> int:
        self.begun.append(number)
        self.threads.add(threading.current_thread().name)
        assert self.may_end.wait(30)
        return number


@pytest.fixture
def ahead() -> Iterator[ReadAhead]:
    """Return one that is closed at the end."""
    made = ReadAhead(2 * PARTS_EACH)
    yield made
    made.close()


def ended(parts: Parts) -> Parts:
    """Let all parts end at once."""
    parts.may_end.set()
    return parts


@pytest.mark.parametrize("places", [0, 1, 3, 100])
def test_values_come_in_order(places: int) -> None:
    """Whatever the number of places, each part is read once, and values keep their order."""
    parts = ended(Parts(50))

    assert list(ReadAhead(places).in_order(parts)) == list(range(50))
    assert sorted(parts.begun) == list(range(50))


@pytest.mark.parametrize(
    ("size_bytes", "at_once"),
    [
        (1, SMALL_EACH),
        (PART_BYTES_MAX // 4, SMALL_EACH),
        (PART_BYTES_MAX // 2, SMALL_EACH // 2),
        (PART_BYTES_MAX, PARTS_EACH),
    ],
)
def test_parts_are_read_at_the_same_time(ahead: ReadAhead, size_bytes: int, at_once: int) -> None:
    """Some parts are under way before the first is taken, more of them if they are small, and no more than that."""
    parts = Parts(40, size_bytes)
    taker = threading.Thread(target=lambda: next(values))
    values = ahead.in_order(parts)
    taker.start()
    wait_until(lambda: len(parts.begun) == at_once, what="the first parts")

    parts.may_end.set()
    taker.join(30)

    assert list(values) == list(range(1, 40))
    assert len(parts.begun) == 40


def test_parts_that_were_not_taken_hold_their_places(ahead: ReadAhead) -> None:
    """Memory is bounded: readers without a place read in their own threads, one part at a time."""
    slow = [ahead.in_order(ended(Parts(9, PART_BYTES_MAX))) for _ in range(2)]
    assert [next(values) for values in slow] == [0, 0]
    parts = ended(Parts(5, PART_BYTES_MAX))

    # The two places of the values that were taken are free again.
    assert list(ahead.in_order(parts)) == list(range(5))

    assert threading.current_thread().name in parts.threads
    assert [list(values) for values in slow] == [list(range(1, 9))] * 2


def test_places_of_a_reader_that_goes_are_free_again(ahead: ReadAhead) -> None:
    """A client that disconnects leaves parts under way; their places are free when they end."""
    for _ in range(20):
        values = ahead.in_order(ended(Parts(9, PART_BYTES_MAX)))
        next(values)
        values.close()  # type: ignore[attr-defined]  # it is a generator
    parts = Parts(9, PART_BYTES_MAX)
    values = ahead.in_order(parts)
    taker = threading.Thread(target=lambda: next(values))
    taker.start()

    wait_until(lambda: len(parts.begun) == PARTS_EACH, what="parts in places")
    parts.may_end.set()
    taker.join(30)
    assert threading.current_thread().name not in parts.threads


def test_large_part_is_read_in_its_turn(ahead: ReadAhead) -> None:
    """A part above the limit is never in memory before its turn."""
    parts = ended(Parts(5, PART_BYTES_MAX + 1))
    values = ahead.in_order(parts)

    for number in range(5):
        assert next(values) == number
        assert parts.begun == list(range(number + 1))
    assert parts.threads == {threading.current_thread().name}


def test_part_in_memory_is_read_in_its_turn(ahead: ReadAhead) -> None:
    """The event loop answers from memory what is there: a thread's turn would keep all other requests waiting."""
    parts = ended(Parts(3 * SMALL_EACH, 0))

    assert list(ahead.in_order(parts)) == list(range(3 * SMALL_EACH))
    assert parts.threads == {threading.current_thread().name}


def test_error_comes_in_its_turn(ahead: ReadAhead) -> None:
    """Pieces read before an error are yielded first; nothing is read after it."""

    def fail() -> int:
        raise UnavailableError("the store failed")

    values = ahead.in_order([Part(lambda: 1, 1), Part(fail, 1), Part(lambda: 3, 1)])

    assert next(values) == 1
    with pytest.raises(UnavailableError):
        next(values)
    assert list(values) == []


def test_part_may_read_ahead_itself(ahead: ReadAhead) -> None:
    """A download within a part takes places that are free, or none; readers never wait for each other's places."""
    outer = [Part(lambda: list(ahead.in_order(ended(Parts(6)))), 1) for _ in range(40)]

    assert list(ahead.in_order(outer)) == [list(range(6))] * 40


def test_closed_one_reads_on() -> None:
    """A restore that is still running when the process stops goes on without threads."""
    ahead = ReadAhead(4)
    values = ahead.in_order(ended(Parts(9)))
    next(values)
    ahead.close()

    assert list(values) == list(range(1, 9))
