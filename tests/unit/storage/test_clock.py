"""Ids sort by time and never repeat."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

from storage.clock import SystemClock, SystemIds
from storage.testing import FakeClock


class _BackwardClock(FakeClock):
    """A wall clock that goes back by a second after each reading."""

    def now_ms(self) -> int:
        self._start_ms -= 1_000
        return super().now_ms()


def test_ids_have_the_layout_of_uuid7() -> None:
    """The layout is 48 bits of time, version 7, counter and variant 2, so tools that know UUIDs can read the ids."""
    found = SystemIds(FakeClock(0x0123456789AB)).unique_id()
    assert re.fullmatch(r"0123456789ab7000[89ab][0-9a-f]{15}", found)


def test_ids_ascend_within_a_millisecond() -> None:
    """Ids keep their order even if a millisecond has more ids than the counter can count."""
    ids = SystemIds(FakeClock())
    found = [ids.unique_id() for _ in range(10_000)]
    assert found == sorted(set(found))


def test_ids_ascend_when_clock_goes_back() -> None:
    """A clock that is set back does not make new ids sort before old ones."""
    ids = SystemIds(_BackwardClock())
    found = [ids.unique_id() for _ in range(100)]
    assert found == sorted(set(found))


def test_ids_sort_by_time_over_hosts() -> None:
    """An id of a later millisecond sorts after an earlier one, whichever host created it."""
    early, late = SystemIds(FakeClock(1_000_000)), SystemIds(FakeClock(1_000_001))
    assert early.unique_id() < late.unique_id()


def test_ids_of_threads_differ() -> None:
    """Threads that share a source get different ids."""
    ids = SystemIds()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: ids.unique_id(), range(5_000)))
    assert len(set(found)) == len(found)


def test_system_clock_counts_milliseconds() -> None:
    """Wall time is of this century; monotonic time does not go back."""
    clock = SystemClock()
    assert 1_600_000_000_000 < clock.now_ms() < 4_000_000_000_000
    assert clock.monotonic_ms() <= clock.monotonic_ms()
