"""How many change sets a service holds, whatever their size."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest

from dstl_service.intake import held_sets
from dstl_service.intake.change_sets import BatchSettings, ChangeSetTracker
from storage.memory_store import MemoryStore
from tests.unit.dstl_service.http_life import Life, service
from tests.unit.dstl_service.samples import segment

SETS_MAX = 100


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    """Return a service that holds few sets, with a job."""
    monkeypatch.setattr(held_sets, "SETS_MAX", SETS_MAX)
    with service(MemoryStore()) as made:
        made.open()
        yield made


def sent(life: Life, checkpoint_id: int = 0) -> int:
    """Send empty sets until the service takes no more; return how many it took."""
    sqn = 0
    while (answer := life.append_raw(b"", checkpoint_id=checkpoint_id, sqn=sqn, attempt=2)).status_code == 200:
        sqn += 1
        assert sqn <= SETS_MAX
    assert answer.status_code == 429
    assert "change sets of job 'job' are held here" in answer.text
    return sqn


def test_empty_sets_are_bounded(life: Life) -> None:
    """C23: sets without bytes take memory, too, so a job holds a bounded number, and other jobs find room."""
    taken = sent(life)
    other = Life(life.client, "other")
    other.open()

    assert 0 < taken <= SETS_MAX // 2
    assert life.append(b"", attempt=2)  # the same set again
    assert other.append(b"")


def test_completed_checkpoint_makes_room(life: Life) -> None:
    """A job at its limit completes its checkpoint, note included, and then sends the next one's sets."""
    ref = life.append(b"few")
    before = sent(life)
    base = life.complete(0, None, ref)

    assert sent(life, 1) == before + 1
    assert life.begin(1).status_code == 200
    life.complete(1, base, life.append(b"few", checkpoint_id=1))


def test_sets_of_older_epochs_leave_nothing() -> None:
    """C23: what is dropped with its epoch takes no memory, though its checkpoint may never exist."""
    tracker = ChangeSetTracker(BatchSettings())
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for sqn in range(1_000):
            tracker.receive(segment(sqn, checkpoint_id=9), 0, preemptive=False)
            tracker.forget_epochs_before(4)
        assert tracemalloc.get_traced_memory()[0] - before < 50_000
    finally:
        tracemalloc.stop()
    assert tracker.in_memory.sets == 0
