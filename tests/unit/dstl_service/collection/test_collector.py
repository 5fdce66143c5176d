"""The service's collector of its jobs' garbage: what does not end it, and what shows that it fails."""

from __future__ import annotations

from typing import Any

import pytest

from dstl_service.collection.tombstones import Deletions
from dstl_service.formats.keys import number_of, place_of
from dstl_service.intake.active_jobs import IDLE_MS
from dstl_service.registry.job_store import JobStore
from dstl_service.settings import GcSettings
from storage.errors import CorruptDataError, UnavailableError
from storage.memory_store import MemoryStore
from storage.testing import FakeClock, FakeIds, Fault, FaultKind, FaultyStore, RecordingStore
from tests.unit.dstl_service.http_life import Life, samples, service
from tests.unit.dstl_service.job_history import JobHistory
from tests.unit.dstl_service.samples import opened
from tests.waiting import wait_until

OFTEN = GcSettings(interval_s=0.01)  # type: ignore[arg-type]  # a fraction, for no test waits for seconds
COLLECTED = 'dstl_orphans{job="job"}'
FAILED = 'dstl_collections_failed_total{job="job"}'
AGE = 'dstl_collection_success_age_seconds{job="job"}'


def collector_of(life: Life) -> Any:
    """Return the task that collects the job's garbage."""
    return life.parts.background_work.work_of(life.parts.jobs.get("job")).collector


def test_collector_outlives_a_bug() -> None:
    """I12: any exception of a round is counted, and the next round collects."""
    store = FaultyStore(MemoryStore())
    with service(store, gc=OFTEN) as life:
        store.inject(Fault("list", FaultKind.FAIL_BEFORE, "job/segments/*", error=lambda: ValueError("bug")))
        life.open()
        found = wait_until(lambda: now if COLLECTED in (now := samples(life)) else None)

    assert found[FAILED] == 1


def test_job_that_cannot_be_collected_keeps_no_deleted_one() -> None:
    """I12: deleted jobs are collected even where a job's own collection keeps failing."""
    store, clock = FaultyStore(MemoryStore()), FakeClock()
    gone = JobStore(store, "gone", clock, FakeIds(7))
    gone.open(None)
    store.inject(Fault("list", FaultKind.FAIL_BEFORE, "job/segments/*", times=None))
    with service(store, clock, gc=OFTEN) as life:
        Deletions(store, clock, FakeIds(8)).bury("gone", "owner", delay_s=0)
        life.open()
        wait_until(lambda: not gone.exists())

        assert samples(life)[FAILED] > 0


def test_ended_collector_is_started_again() -> None:
    """I12: opening a job starts a collector, even if the job's first one ended."""
    with service(MemoryStore(), gc=OFTEN) as life:
        life.open()
        first = collector_of(life)
        life.portal.call(first.cancel)
        wait_until(first.done)
        life.open()

        assert not collector_of(life).done()


def test_collector_ends_when_the_job_is_owned_elsewhere() -> None:
    """A former coordinator leaves a job's garbage to the current one, and reports nothing about it."""
    store = MemoryStore()
    with service(store, gc=OFTEN) as life:
        life.open()
        collector = collector_of(life)
        opened(store, host=2).claim("elsewhere")
        wait_until(collector.done)

        assert AGE not in samples(life)


def test_collector_goes_on_after_a_claim_without_a_fence() -> None:
    """I12: a driver that died between its epoch and its fence took nothing over, so this service still coordinates."""
    store = MemoryStore()
    seen, dying = RecordingStore(store), FaultyStore(store)
    with service(seen, gc=OFTEN) as life:
        life.open()
        collector = collector_of(life)
        dying.inject(Fault("put", FaultKind.FAIL_BEFORE, "job/checkpoints/*"))
        with pytest.raises(UnavailableError):
            opened(dying, host=2).claim("dies")
        seen.clear()
        wait_until(lambda: collector.done() or seen.count("list", "job/segments/*") > 5)

        assert not collector.done()


def test_restarted_coordinator_collects() -> None:
    """I12: a service that continues a driver's epoch, begun by another process, collects the job's garbage."""
    store = MemoryStore()
    with service(store, gc=OFTEN) as life:
        life.open()
        epoch = life.epoch
    with service(store, gc=OFTEN) as life:
        life.epoch = epoch
        life.complete(0, None, life.append(b"payload", checkpoint_id=0))

        assert not collector_of(life).done()


def test_collector_ends_when_the_job_is_not_driven_any_more() -> None:
    """A job whose driver has been silent for long is collected once more, and again when it completes a checkpoint."""
    clock = FakeClock()
    with service(MemoryStore(), clock, gc=OFTEN) as life:
        life.open()
        collector = collector_of(life)
        clock.advance(2 * IDLE_MS)
        wait_until(collector.done)
        assert COLLECTED in samples(life)
        life.complete(0, None, life.append(b"payload", checkpoint_id=0))

        assert not collector_of(life).done()


def test_collector_goes_on_where_a_batch_comes_in_its_last_round() -> None:
    """The age of the last collection stays in the metrics if a rare batch arrives during the collector's last round."""
    store, clock = FaultyStore(MemoryStore()), FakeClock()
    seen = RecordingStore(store)
    with service(seen, clock, gc=OFTEN) as life:
        life.open()
        collector = collector_of(life)
        store.inject(Fault("list", FaultKind.DELAY, "job/segments/*", times=None))
        clock.advance(2 * IDLE_MS)
        seen.clear()
        wait_until(lambda: seen.count("list"))
        assert life.client.get(life.path).status_code == 200
        store.heal()
        seen.clear()
        wait_until(lambda: collector.done() or seen.count("list") > 20)

        assert not collector.done()
        assert AGE in samples(life)


def test_nothing_is_shown_of_a_job_that_was_deleted() -> None:
    """The age of the last collection does not grow after a job's end, which would look like a failure."""
    with service(MemoryStore(), gc=GcSettings()) as life:
        life.open()
        assert AGE in samples(life)
        life.portal.call(life.parts.jobs.recreate, "job")
        assert AGE not in samples(life)


def test_age_of_last_success_is_shown() -> None:
    """A collector that keeps failing is visible by the time since its last success, even if it never had one."""
    store, clock = FaultyStore(MemoryStore()), FakeClock()
    with service(store, clock, gc=GcSettings()) as life:
        life.open()
        clock.advance(5000)
        store.inject(Fault("list", FaultKind.FAIL_BEFORE, "job/segments/*"))
        path = f"{life.path}/garbage-collection?dry_run=false"
        assert life.client.post(path).status_code == 503
        failed = samples(life)
        assert life.client.post(path).status_code == 200
        succeeded = samples(life)

    assert (failed[FAILED], failed[AGE]) == (1, 5)
    assert (succeeded[FAILED], succeeded[AGE]) == (1, 0)


@pytest.mark.parametrize("key", ["job/epochs/notes.txt", "job/checkpoints/copy-of-1.json", "job/checkpoints/notes.txt"])
def test_foreign_object_is_named(key: str) -> None:
    """I10: a foreign object among epochs or manifests stops a collection; the error has its name and a remedy."""
    history = JobHistory()
    history.complete(history.object(0))
    history.store.put(key, b"foreign")

    with pytest.raises(CorruptDataError, match="move the object elsewhere") as caught:
        history.collect()

    assert key in str(caught.value)


def test_names_are_read() -> None:
    """The project's own object names are mapped to their places."""
    assert number_of("job/epochs/00000000000000000007.json") == 7
    assert place_of("job/checkpoints/00000000000000000003.000002.json") == (0, 3, 2)
    assert place_of("job/checkpoints/r000000000007.00000000000000000003.000002.json") == (7, 3, 2)
