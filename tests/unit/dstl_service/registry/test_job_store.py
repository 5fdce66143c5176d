"""A job's objects: which driver owns the job, and which checkpoints exist."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dstl_service.formats.keys import encode_job
from dstl_service.formats.manifest import Manifest, ManifestKind
from dstl_service.registry.job_store import JobStore
from dstl_service.wire import CheckpointRef
from storage.errors import (
    ConflictError,
    CorruptDataError,
    FencedError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from storage.memory_store import MemoryStore
from storage.testing import FakeClock, FakeIds, Fault, FaultKind, FaultyStore, RecordingStore
from tests.unit.dstl_service.interleaving import PausingStore, StaleStore
from tests.unit.dstl_service.samples import SteppingStore, manifest, opened


def completed(
    job_store: JobStore, epoch: int, checkpoint_id: int, base: Manifest | None = None, uid: str = ""
) -> Manifest:
    """Create a checkpoint of this epoch."""
    created, _ = job_store.create_manifest(
        manifest(
            checkpoint_id,
            epoch,
            base.ref if base else None,
            uid=uid or f"{epoch}x{checkpoint_id}",
            job_uid=job_store.job_uid,
        )
    )
    return created


class TestOpen:
    """``job.json``."""

    def test_new_job_gets_default(self) -> None:
        """Opening a job that does not exist creates it with 128 key groups."""
        jobs = JobStore(MemoryStore(), "job", FakeClock(), FakeIds())
        assert not jobs.exists()
        jobs.open(None)

        assert jobs.exists()
        assert jobs.max_parallelism == 128

    def test_stored_parallelism_is_taken(self) -> None:
        """Without max_parallelism, an open returns the value of the job's creation, and the same job uid."""
        store = MemoryStore()
        first = JobStore(store, "job", FakeClock(), FakeIds(1))
        first.open(7)
        second = opened(store, host=2)

        assert (second.max_parallelism, second.job_uid) == (7, first.job_uid)

    def test_other_parallelism_is_refused(self) -> None:
        """max_parallelism never changes; the message names both values."""
        store = MemoryStore()
        opened(store)

        with pytest.raises(InvalidInputError, match="max_parallelism 128, not 64"):
            opened(store, host=2).open(64)

    @pytest.mark.parametrize("max_parallelism", [0, -1, 32_769])
    def test_impossible_parallelism_is_refused(self, max_parallelism: int) -> None:
        """A number of key groups that no key can have creates no job."""
        jobs = JobStore(MemoryStore(), "job", FakeClock(), FakeIds())

        with pytest.raises(InvalidInputError):
            jobs.open(max_parallelism)
        assert not jobs.exists()

    def test_job_survives_lost_response(self) -> None:
        """I5: if the creation of a job was not answered, the retry finds that job."""
        store = FaultyStore(MemoryStore(), Fault("put", FaultKind.FAIL_AFTER))
        jobs = JobStore(store, "job", FakeClock(), FakeIds())
        with pytest.raises(UnavailableError):
            jobs.open(9)
        jobs.open(9)

        assert json.loads(store.get("job/job.json"))["uid"] == jobs.job_uid

    @pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"format":9,"uid":"u","max_parallelism":1}', b"\xff"])
    def test_damaged_job_is_reported(self, content: bytes) -> None:
        """I10: an unreadable ``job.json`` is an error with its name."""
        store = MemoryStore()
        store.put("job/job.json", content)

        with pytest.raises(CorruptDataError, match=r"job/job\.json"):
            opened(store)


class TestClaim:
    """Taking a job over."""

    def test_first_claim_finds_nothing(self) -> None:
        """A new job's first owner has epoch 1 and starts without a checkpoint."""
        assert opened(MemoryStore()).claim("owner") == (1, None)

    def test_claim_returns_newest_checkpoint(self) -> None:
        """A new owner gets the next epoch and continues from the newest checkpoint."""
        store = MemoryStore()
        jobs = opened(store)
        epoch, _ = jobs.claim("one")
        first = completed(jobs, epoch, 0)
        second = completed(jobs, epoch, 1, first)

        assert opened(store, host=2).claim("two") == (2, second)

    def test_older_epoch_is_fenced(self) -> None:
        """I4: once a newer owner's claim has returned, the older owner's checkpoint is refused and does not exist."""
        store = MemoryStore()
        old, new = opened(store, host=1), opened(store, host=2)
        epoch, _ = old.claim("old")
        first = completed(old, epoch, 0)
        new.claim("new")

        with pytest.raises(FencedError, match="taken over by epoch 2"):
            completed(old, epoch, 1, first)
        assert list(new.completed()) == [first]

    def test_older_epoch_is_fenced_in_new_job(self) -> None:
        """I4: the fence also holds if no checkpoint was ever completed."""
        store = MemoryStore()
        old, new = opened(store, host=1), opened(store, host=2)
        epoch, _ = old.claim("old")
        new.claim("new")

        with pytest.raises(FencedError):
            completed(old, epoch, 0)
        assert list(new.completed()) == []

    def test_quicker_older_epoch_stands(self) -> None:
        """I4: a checkpoint that was written just before the fence counts; the new owner continues from it."""
        store = SteppingStore()
        old, new = opened(store, host=1), opened(store, host=2)
        epoch, _ = old.claim("old")
        first = completed(old, epoch, 0)
        quicker: list[Manifest] = []
        store.before_put("job/checkpoints/*", lambda: quicker.append(completed(old, epoch, 1, first)))

        assert new.claim("new") == (2, quicker[0])
        with pytest.raises(FencedError):
            completed(old, epoch, 2, quicker[0])

    def test_fence_of_idle_epoch_is_passed(self) -> None:
        """Owners that completed nothing leave fences; the next one still continues from the newest checkpoint."""
        store = MemoryStore()
        jobs = opened(store)
        first = completed(jobs, jobs.claim("one")[0], 0)
        jobs.claim("two")
        jobs.claim("three")

        assert jobs.claim("four") == (4, first)
        assert completed(jobs, 4, 1, first).generation == 3

    @pytest.mark.parametrize("pattern", ["job/epochs/*", "job/checkpoints/*"])
    @pytest.mark.parametrize("kind", [FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER])
    def test_failed_claim_can_be_repeated(self, pattern: str, kind: FaultKind) -> None:
        """A claim that breaks off at any step blocks no other claim: the next one gets a higher epoch."""
        store = FaultyStore(MemoryStore(), Fault("put", kind, pattern))
        jobs = opened(store)
        with pytest.raises(UnavailableError):
            jobs.claim("broken")
        epoch, latest = jobs.claim("next")

        assert latest is None
        assert epoch == (1 if (pattern, kind) == ("job/epochs/*", FaultKind.FAIL_BEFORE) else 2)
        assert completed(jobs, epoch, 0).epoch == epoch

    def test_racing_claimers_get_two_epochs(self) -> None:
        """Two owners that claim at the same moment never share an epoch."""
        store = SteppingStore()
        one, two = opened(store, host=1), opened(store, host=2)
        claims: list[int] = []
        store.before_put("job/epochs/*", lambda: claims.append(two.claim("two")[0]))
        with_race = one.claim("one")

        assert claims == [1]
        assert with_race == (2, None)

    def test_overtaken_claim_is_fenced(self) -> None:
        """I4: an owner that is overtaken in the middle of its claim never completes anything after the newer one."""
        store = SteppingStore()
        slow, quick = opened(store, host=1), opened(store, host=2)
        newest: list[Manifest] = []

        def overtake() -> None:
            epoch, _ = quick.claim("quick")
            newest.append(completed(quick, epoch, 0))

        store.before_put("job/checkpoints/*", overtake)
        with pytest.raises(FencedError):
            epoch, latest = slow.claim("slow")
            completed(slow, epoch, 1, latest)

        assert list(quick.completed()) == newest
        assert completed(quick, 2, 1, newest[0]).epoch == 2

    def test_claim_reads_little_of_long_history(self) -> None:
        """A claim lists from the last epoch's newest checkpoint on, and reads no earlier manifests."""
        store = RecordingStore(MemoryStore())
        jobs = opened(store)
        epoch, last = jobs.claim("one")
        for checkpoint_id in range(30):
            last = completed(jobs, epoch, checkpoint_id, last)
        jobs.claim("two")
        store.clear()

        assert opened(store, host=2).claim("three") == (3, last)
        assert store.count("get", "job/checkpoints/*") <= 3

    def test_old_listings_mislead_nobody(self) -> None:
        """I4: on a file system with stale listings, the older of two owners is fenced, too."""
        store = MemoryStore()
        first = opened(store, host=1)
        epoch, _ = first.claim("first")
        made = completed(first, epoch, 0)
        slow = StaleStore(store)

        def others() -> None:
            made_since.append(completed(first, epoch, 1, made))
            epoch_since, latest = quick.claim("quick")
            made_since.append(completed(quick, epoch_since, 2, latest))

        quick, made_since = opened(store, host=2), list[Manifest]()
        slow.pause_at("put", "job/checkpoints/*", others)
        with pytest.raises(FencedError):
            opened(slow, host=3).claim("slow")

        assert completed(quick, 3, 3, made_since[-1]).base == made_since[-1].ref
        assert opened(slow, host=4).claim("next")[1] == quick.newest()

    def test_fence_at_a_place_that_was_freed_is_none(self) -> None:
        """I4: an owner whose claim pauses until its place was completed, subsumed and deleted starts after the end."""
        store = MemoryStore()
        old = opened(store, host=1)
        epoch, _ = old.claim("old")
        last = completed(old, epoch, 0)
        paused = PausingStore(store)

        def run_on() -> None:
            nonlocal last
            made = [last]
            for checkpoint_id in range(1, 9):
                made.append(completed(old, epoch, checkpoint_id, made[-1]))
            last = made[-1]
            old.delete_manifests([found.ref for found in made[:-1]])

        paused.pause_at("put", "job/checkpoints/*", run_on)

        assert opened(paused, host=2).claim("new") == (2, last)
        with pytest.raises(FencedError):
            completed(old, epoch, 9, last)

    def test_damaged_epoch_is_reported(self) -> None:
        """I10: an unreadable object of an epoch is an error with its name."""
        store = MemoryStore()
        jobs = opened(store)
        store.put("job/epochs/00000000000000000001.json", b"{")

        with pytest.raises(CorruptDataError, match="job/epochs"):
            jobs.claim("owner")


class TestCreate:
    """Creating checkpoints."""

    def test_manifest_goes_after_own_fence(self) -> None:
        """The first checkpoint of an epoch is the generation after the epoch's fence."""
        jobs = opened(MemoryStore())
        created = completed(jobs, jobs.claim("owner")[0], 0)

        assert created.generation == 1
        assert jobs.resolve(created.ref) == created

    def test_size_is_that_of_the_object(self) -> None:
        """Creating a manifest, also for the second time, returns the size of the stored object."""
        store = MemoryStore()
        jobs = opened(store)
        epoch, _ = jobs.claim("driver")
        checkpoint = manifest(0, epoch, None, uid="same", job_uid=jobs.job_uid)
        (created, size_bytes), (_, again_bytes) = jobs.create_manifest(checkpoint), jobs.create_manifest(checkpoint)

        stored = store.head(f"job/checkpoints/{created.id:020d}.{created.generation:06d}.json")
        assert (size_bytes, again_bytes) == (stored.size_bytes, stored.size_bytes)

    def test_lost_response_is_success(self) -> None:
        """I5: a manifest whose PUT was not answered is recognised by its uid when it is created again."""
        store = FaultyStore(MemoryStore())
        jobs = opened(store)
        epoch, _ = jobs.claim("owner")
        store.inject(Fault("put", FaultKind.FAIL_AFTER, "*000001.json"))
        with pytest.raises(UnavailableError):
            completed(jobs, epoch, 0, uid="same")

        again = completed(jobs, epoch, 0, uid="same")

        assert again.ref == CheckpointRef(0, 1, "same")
        assert list(jobs.completed()) == [again]

    def test_lost_response_is_success_after_fence(self) -> None:
        """I5: the repeated call also succeeds when a newer epoch has continued from that checkpoint."""
        store = MemoryStore()
        old, new = opened(store, host=1), opened(store, host=2)
        epoch, _ = old.claim("old")
        first = completed(old, epoch, 0, uid="same")
        assert new.claim("new")[1] == first

        assert completed(old, epoch, 0, uid="same") == first

    def test_stored_content_counts_after_lost_response(self) -> None:
        """I3: a coordinator that repeats another one's call goes on from what is stored, not from its own plan."""
        store = MemoryStore()
        former, present = opened(store, host=1), opened(store, host=2)
        epoch, _ = former.claim("driver")
        planned = manifest(0, epoch, None, uid="same", job_uid=former.job_uid)
        first, _ = former.create_manifest(planned)

        again, _ = present.create_manifest(replace(planned, kind=ManifestKind.COMPLETE, created_ms=5))

        assert again == first

    def test_repeated_batch_alters_nothing(self) -> None:
        """I3: a batch that this owner already completed is not completed again with other content."""
        jobs = opened(MemoryStore())
        epoch, _ = jobs.claim("owner")
        before = completed(jobs, epoch, 0, uid="one")

        with pytest.raises(ConflictError):
            completed(jobs, epoch, 0, uid="two")
        assert list(jobs.completed()) == [before]

    def test_repeated_batch_of_older_epoch_is_refused(self) -> None:
        """I4: an older owner that executes its last batch again cannot replace the base of the newer owner."""
        store = MemoryStore()
        old, new = opened(store, host=1), opened(store, host=2)
        epoch, _ = old.claim("old")
        first = completed(old, epoch, 0, uid="one")
        assert new.claim("new")[1] == first

        with pytest.raises(ConflictError, match=r"already complete, as 0\.1\.one"):
            completed(old, epoch, 0, uid="two")
        assert list(new.completed()) == [first]


class TestRead:
    """Reading checkpoints back."""

    def test_chain_leads_to_first_checkpoint(self) -> None:
        """A chain is the checkpoint and all its ancestors, newest first, over several epochs."""
        store = MemoryStore()
        one, two = opened(store, host=1), opened(store, host=2)
        first = completed(one, one.claim("one")[0], 0)
        second = completed(two, two.claim("two")[0], 1, first)

        assert list(two.chain(second.ref)) == [second, first]

    @pytest.mark.parametrize(
        "ref", [CheckpointRef(0, 1, "other"), CheckpointRef(0, 9, "1x0"), CheckpointRef(5, 0, "1x0")]
    )
    def test_wrong_reference_is_not_found(self, ref: CheckpointRef) -> None:
        """I2: a reference with another uid, generation or id resolves to nothing."""
        jobs = opened(MemoryStore())
        completed(jobs, jobs.claim("owner")[0], 0)

        with pytest.raises(NotFoundError):
            jobs.resolve(ref)

    def test_fence_is_no_checkpoint(self) -> None:
        """A fence can neither be resolved nor is it listed."""
        jobs = opened(MemoryStore())
        jobs.claim("owner")

        with pytest.raises(NotFoundError):
            jobs.resolve(jobs.load(0, 0).ref)
        assert list(jobs.completed()) == []
        assert jobs.load(0, 0).kind is ManifestKind.FENCE

    def test_completed_are_in_order(self) -> None:
        """All checkpoints are listed once each, by ascending id."""
        jobs = opened(MemoryStore())
        epoch, last = jobs.claim("owner")
        made = []
        for checkpoint_id in range(12):
            last = completed(jobs, epoch, checkpoint_id, last)
            made.append(last)

        assert list(jobs.completed()) == made

    def test_damaged_manifest_is_reported(self) -> None:
        """I10: a damaged manifest is an error with its name, never a shorter history."""
        store = MemoryStore()
        jobs = opened(store)
        created = completed(jobs, jobs.claim("owner")[0], 0)
        key = "job/checkpoints/00000000000000000000.000001.json"
        store.put(key, store.get(key)[:-9])

        with pytest.raises(CorruptDataError, match="000001"):
            opened(store, host=2).resolve(created.ref)

    @pytest.mark.parametrize("left", ["job/checkpoints/", "job/epochs/", "job/hints/", "job/segments/"])
    def test_no_job_begins_beside_the_rest_of_another(self, left: str) -> None:
        """I10: whatever is left of a job without its ``job.json``, no start makes another one, which ends the rest."""
        store = MemoryStore()
        jobs = opened(store)
        completed(jobs, jobs.claim("owner")[0], 0)
        store.put("job/segments/host/1.seg", b"a segment")
        store.delete([info.key for info in store.list("job/") if not info.key.startswith(left)])
        assert list(store.list(left))

        with pytest.raises(CorruptDataError, match=rf"job/job\.json is lost, since {left}.* exists.*fsck --rebuild"):
            opened(store, host=2)
        assert not any(info.key == "job/job.json" for info in store.list("job/"))

    def test_manifest_of_other_life_is_refused(self) -> None:
        """A manifest beside which another job's ``job.json`` was put does not count as one of this job."""
        store = MemoryStore()
        jobs = opened(store)
        created = completed(jobs, jobs.claim("owner")[0], 0)
        store.put("job/job.json", encode_job("f" * 32, 128))

        with pytest.raises(CorruptDataError, match="of a job of uid"):
            opened(store, host=2).resolve(created.ref)
