"""
Ownership of a job: epochs, the fences that end those of older drivers, and rewinds, which begin with an epoch.

How an older driver is kept out (I4): a new owner first claims the next epoch, then puts a *fence* at the place of the
next manifest. If that place is taken, the older driver was quicker: its checkpoint remains valid, and the fence moves
to the next place. The claim ends when its fence is the last entry. From then on every later write of the older driver
conflicts with it. Neither a clock nor a lock takes part.

How a rewind works: the epoch's record names the target, so the target is decided with the epoch, and a new branch of
manifests begins (`dstl_service.formats.keys.Place`). First a fence ends the branch before, then the target is written
as the first manifest of the new one. Every process may repeat each of these steps after another died or paused: the
next claim, rewind or garbage collection completes the rest. If two run at once, one wins each put, and the other
continues from there. Manifests after the target in the old branch are never touched: they left the job because
no newer manifest leads to them, and retention deletes them.

Blocking I/O; the service calls it in threads.
"""

from __future__ import annotations

from dataclasses import replace

from dstl_service.formats.checkpoint_record import record_of_rewind
from dstl_service.formats.keys import EpochRecord, Place, Rewind
from dstl_service.formats.manifest import Manifest, ManifestKind
from dstl_service.formats.under_way import NOTHING
from dstl_service.registry.epochs import EpochStore
from dstl_service.registry.manifest_log import Stand, place_of_manifest
from dstl_service.registry.manifest_reader import ManifestReader
from dstl_service.wire import CLOSED_SINK, RECENT_MAX, SET_ASIDE_SUFFIX, CheckpointRef, OperatorInfo
from storage.clock import Clock, IdSource
from storage.errors import ConflictError, CorruptDataError, FencedError, NotFoundError
from storage.model import SegmentHandle
from storage.object_store import ObjectStore
from storage.segment_format import encode_object


class OwnedJob(ManifestReader):
    """A job that drivers take over from each other, and rewind."""

    def __init__(self, store: ObjectStore, job: str, clock: Clock, ids: IdSource) -> None:
        super().__init__(store, job)
        self._clock = clock
        self._ids = ids
        self._epochs = EpochStore(store, self._folder)
        self._epoch_seen = 0
        self._own_fence: tuple[int, Place] | None = None
        self.max_parallelism = 0

    def claim(self, owner: str) -> tuple[int, Manifest | None]:
        """
        Take the job over: return the new epoch and the manifest to continue from (None: none was ever completed).

        An unfinished rewind is finished first.

        Raises:
            FencedError: A newer epoch began meanwhile.
            CorruptDataError: Epochs are lost: manifests are of a newer epoch than the newest record.
        """
        record = self._begin_epoch(owner, None)
        stand, fence = self._end_branch(record, record.branch, record.latest, record.tail)
        self.check_still_newest(record.epoch)
        self._own_fence = record.epoch, fence
        return record.epoch, stand.latest

    def begin_rewind(self, owner: str, savepoint: str, target: int) -> EpochRecord:
        """
        Decide that the job is rewound to a savepoint; `finish_rewind` does it, or the next claim, rewind or collection.

        Args:
            owner: The caller, for people.
            savepoint: Holds the target's manifest until the rewind is done; then it is deleted.
            target: The checkpoint's id.
        """
        return self._begin_epoch(owner, (savepoint, target))

    def finish_rewind(self, record: EpochRecord) -> Manifest:
        """
        Return the first manifest of a rewind's branch, completing the rewind if necessary.

        Raises:
            NotFoundError: The savepoint that holds the target was deleted by hand.
        """
        assert record.rewind is not None
        if (first := self._first_of_branch(record)) is not None:
            return first
        try:
            parent, _ = self._end_branch(record, record.rewind.parent, record.latest, record.tail)
            if parent.latest is None:
                raise NotFoundError(f"job {self._job!r} has no checkpoint left to be rewound from", job=self._job)
            self.keep(before_rewind(parent.latest.ref), parent.latest)
            target = self._target_of(record.rewind)
            restored = self._restored(target, record, parent.latest)
            note = put_note(self._store, self._ids, self._job, self.max_parallelism, restored)
            self._log.append(replace(restored, note=note))
        except (NotFoundError, ConflictError, CorruptDataError):
            # Another process finished the rewind, and the job went on so far that manifests read here were deleted.
            if self._first_of_branch(record) is None:
                raise
        return self.finish_rewind(record)

    def settled_epoch(self) -> int:
        """
        Return the newest epoch's number; an unfinished rewind is finished first.

        A collector calls this first, then reads which objects are named, and calls `has_newer_epoch` before it deletes
        objects. A rewind to a checkpoint that was not named then pins it by a savepoint, begins an epoch, and releases
        the savepoint at its end: so the collector sees one or the other (I11).
        """
        record = self._newest_epoch()
        if record is None:
            return self._epochs.first - 1
        if record.rewind is not None:
            self.finish_rewind(record)
        return record.epoch

    def has_newer_epoch(self, epoch: int) -> bool:
        """Return whether a newer epoch began; two requests."""
        return self._epochs.newer_than(epoch) is not None

    def check_still_newest(self, epoch: int) -> None:
        """Raise `FencedError` if a newer epoch began."""
        newer = self._epochs.newer_than(epoch)
        if newer is not None:
            raise FencedError(
                f"job {self._job!r} was taken over by epoch {newer} while epoch {epoch} was running",
                epoch=epoch,
                newer_epoch=newer,
            )

    def keep(self, name: str, manifest: Manifest, held_for: str = "") -> Manifest:
        """Keep a checkpoint under a name; see `dstl_service.registry.savepoints.SavepointStore.create`."""
        base = manifest.base if manifest.kind is ManifestKind.DELTA else None
        before = self.state(base) if base is not None else None
        return self.savepoints.create(name, manifest, before, self._ids.unique_id(), held_for)

    def newest(self) -> Manifest | None:
        """Return the newest checkpoint, or None."""
        return self.frontier()[0]

    def frontier(self) -> tuple[Manifest | None, int]:
        """Return the newest checkpoint, and the epoch that may complete the next one: no older one can (I4)."""
        stand = self._log.beyond(self._stand(self._newest_epoch()))
        return stand.latest, stand.epoch

    def _begin_epoch(self, owner: str, back_to: tuple[str, int] | None) -> EpochRecord:
        """Claim the next epoch; finish an unfinished rewind first."""
        while True:
            newest = self._newest_epoch()
            if newest is not None and newest.rewind is not None:
                self.finish_rewind(newest)
            stand = self._stand(newest)
            epoch = newest.epoch + 1 if newest else self._epochs.first
            record = EpochRecord(
                epoch=epoch,
                owner=owner,
                uid=self._ids.unique_id(),
                began_ms=self._clock.now_ms(),
                branch=epoch if back_to else stand.branch,
                latest=place_of_manifest(stand.latest) if stand.latest else None,
                tail=place_of_manifest(stand.last) if stand.last else None,
                rewind=Rewind(*back_to, stand.branch) if back_to else None,
            )
            if self._epochs.begin(record):
                if newest is not None and newest.rewind is not None:
                    self.savepoints.discard(newest.rewind.savepoint)
                return record

    def _end_branch(
        self, record: EpochRecord, branch: int, latest: Place | None, tail: Place | None
    ) -> tuple[Stand, Place]:
        """
        Put an epoch's fence at the end of a branch; return the branch's end and the fence's place.

        The fence counts once it is the last entry. A successful put alone does not prove that: the place may have held
        a checkpoint that the older driver completed, retained for a while, and deleted, while this call was paused.
        """
        taken: list[Place] = []
        while True:
            stand = self._log.stand(branch, latest, tail, taken)
            if stand.last is not None and stand.epoch >= record.epoch:
                if stand.epoch > record.epoch:
                    self.check_still_newest(record.epoch)
                    raise CorruptDataError(
                        f"epochs of job {self._job!r} are lost: a manifest is of epoch {stand.epoch}, which has no "
                        "record; `dstl fsck --rebuild` restores them",
                        job=self._job,
                    )
                if stand.last.kind is ManifestKind.FENCE:
                    return stand, place_of_manifest(stand.last)
            taken.append(stand.next_place)
            try:
                place, uid = stand.next_place, self._ids.unique_id()
                self._log.append(fence(place, self.job_uid, record.epoch, uid, self._clock.now_ms()))
            except ConflictError:
                if record.rewind is None:
                    self.check_still_newest(record.epoch)

    def _target_of(self, rewind: Rewind) -> Manifest:
        try:
            return self.savepoints.load(rewind.savepoint)
        except NotFoundError as error:
            raise NotFoundError(
                f"job {self._job!r} is being rewound to savepoint {rewind.savepoint!r}, which was deleted: create it "
                f"again with `dstl savepoints --create {rewind.savepoint} --checkpoint {rewind.target}`, or from "
                "another checkpoint",
                job=self._job,
            ) from error

    def _restored(self, target: Manifest, record: EpochRecord, newest: Manifest) -> Manifest:
        """
        Return the first manifest of a rewind's branch, without anything under way.

        A sink has all slots of before and after: a driver from before the rewind is fenced in each of them. It knows
        the checkpoints that are given up, whose output it may have published.
        """
        sinks = {sink.name: sink for sink in newest.operators if sink.is_sink}
        operators = tuple(
            _sink_after(sinks.get(item.name), item, newest.ref) if item.is_sink else item
            for item in (*target.operators, *_forgotten_sinks(target, newest))
        )
        first = first_of_branch(target, newest.ref, record.epoch, self._ids.unique_id(), self._clock.now_ms())
        return replace(first, operators=operators)

    def _first_of_branch(self, record: EpochRecord) -> Manifest | None:
        """Return the oldest stored manifest of a rewind's branch; None while it is empty."""
        assert record.rewind is not None
        first = self._log.find(Place(record.branch, record.rewind.target, 0))
        if first is None and (place := self._log.first_of(record.branch)) is not None:
            first = self._log.find(place)
        return first

    def _stand(self, record: EpochRecord | None) -> Stand:
        """Return the end of the job's branch; until a rewind is done, that of the branch before it."""
        if record is None:
            return self._log.stand(0)
        if record.rewind is None:
            return self._log.stand(record.branch, record.latest, record.tail)
        if (first := self._first_of_branch(record)) is not None:
            return self._log.stand(record.branch, taken=[place_of_manifest(first)])
        return self._log.stand(record.rewind.parent, record.latest, record.tail)

    def _newest_epoch(self) -> EpochRecord | None:
        """Return the newest epoch's record. A new one clears the caches, which may be stale or another job's."""
        record = self._epochs.newest()
        number = record.epoch if record else 0
        if number != self._epoch_seen:
            self.forget()
            self._epoch_seen = number
        return record


def _sink_after(before: OperatorInfo | None, target: OperatorInfo, newest: CheckpointRef) -> OperatorInfo:
    """Return a sink of a rewind's target as the new branch begins with it; `before` is what it was at the end."""
    recent = [*(target.recent if before is None else before.recent), newest]
    slots = target.slots_ever if before is None else max(target.slots_ever, before.slots_ever)
    return replace(target, parallelism=slots, recent=recent[-RECENT_MAX:])


def _forgotten_sinks(target: Manifest, newest: Manifest) -> list[OperatorInfo]:
    """
    Return the sinks that a rewind's target does not know, as closed ones without output.

    The query may have one of them again, with fewer slots. None has the name of a table of the target or of its rows
    set aside: no query could start then, and with such a table none has that sink.
    """
    taken = {item.name for item in target.operators}
    taken |= {item.name + SET_ASIDE_SUFFIX for item in target.operators if item.has_table}
    unknown = (item for item in newest.operators if item.is_sink and item.name not in taken)
    return [replace(sink, kind=CLOSED_SINK, published=None) for sink in unknown]


def fence(place: Place, job_uid: str, epoch: int, uid: str, created_ms: int) -> Manifest:
    """Return the fence that keeps older epochs from a place."""
    return Manifest(
        kind=ManifestKind.FENCE,
        job_uid=job_uid,
        id=place.id,
        generation=place.generation,
        uid=uid,
        epoch=epoch,
        created_ms=created_ms,
    )


def first_of_branch(target: Manifest, newest: CheckpointRef, epoch: int, uid: str, created_ms: int) -> Manifest:
    """
    Return the first manifest of the branch that an epoch begins, from one that has all of the target's state.

    Args:
        target: The checkpoint to go on from.
        newest: The checkpoint that the job is set back from.
        epoch: The epoch, which names the branch.
        uid: The manifest's uid.
        created_ms: Time of creation.
    """
    return replace(
        target,
        kind=ManifestKind.COMPLETE,
        uid=uid,
        generation=Place(epoch, target.id, 0).generation,
        epoch=epoch,
        created_ms=created_ms,
        rewound_from=newest,
        kept_by="",
        held_for="",
        under_way=NOTHING,
    )


def put_note(store: ObjectStore, ids: IdSource, job: str, max_parallelism: int, first: Manifest) -> SegmentHandle:
    """Store the note of the first manifest of a branch in an object of its own; return its handle."""
    buffers, (entry,) = encode_object([record_of_rewind(job, max_parallelism, first).to_segment()])
    key = f"{job}/segments/rewind/{ids.unique_id()}.seg"
    store.put(key, buffers)
    return SegmentHandle(key, sum(map(len, buffers)), entry)


def before_rewind(newest: CheckpointRef) -> str:
    """
    Return the name of the savepoint that keeps the checkpoint a job is rewound from: another one for each checkpoint.

    A taken name would stop the rewind, and with it the job. A uid begins with its time, so no part of it is enough.
    """
    return f"before-rewind-{newest.to_text()}"
