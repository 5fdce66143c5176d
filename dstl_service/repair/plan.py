"""
Decides to which checkpoint a job can be restored, from notes, manifests and stored segments. No I/O.

Segments and notes of candidates that never became a checkpoint lie among the others. The rules:

1. A checkpoint with a manifest or a savepoint, or named by another one as its base, existed: it is *proven*. So is the
   first of a rewind's branch, which its note tells: the note is stored after the decision.
2. Other candidates at the id of a proven one were given up.
3. From the id at which a higher epoch began, all candidates of lower epochs were given up: they were fenced (I4).
4. Among the rest, the newest checkpoint wins whose sets are all stored with the right checksums, and likewise its
   predecessors back to the first checkpoint, or to one whose whole state is recorded in one place. Among several at one
   id: a proven one, then the higher epoch, then the one that its coordinator planned last: their notes may have been
   stored by hosts whose clocks differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from dstl_service.formats.checkpoint_header import CheckpointHeader, header_of
from dstl_service.formats.checkpoint_record import CheckpointRecord, NotedSet
from dstl_service.formats.manifest import Manifest, StateView
from dstl_service.repair.scan import Registry
from storage.errors import CorruptDataError
from storage.model import ChangeSetId, SegmentHandle, SegmentKind

Stored = Mapping[ChangeSetId, Sequence[SegmentHandle]]
"""The stored segments; a set whose upload was repeated is stored more than once."""

_Key = tuple[int, str]


@dataclass(frozen=True, slots=True)
class CheckpointCandidate(CheckpointHeader):
    """
    A try at a checkpoint, according to its note or manifest; `uid` distinguishes those at one id.

    Args:
        id: The checkpoint's id.
        stored_as: Name of the object with its note; names ascend with time, even after objects were copied.
        created_ms: When it was stored, as far as known.
        sets: The sets that the checkpoint added.
        start: All earlier state, if recorded.
        manifest: The readable manifest, if there is one.
        note: Handle of its note, if known.
        is_kept: A savepoint keeps it, or the job was rewound to it or began with it as a fork, so it existed.
        planned_ms: As in the note; 0 if unknown.
    """

    id: int
    stored_as: str
    created_ms: int
    sets: tuple[NotedSet, ...]
    start: StateView | None
    manifest: Manifest | None = None
    note: SegmentHandle | None = None
    is_kept: bool = False
    planned_ms: int = 0

    @property
    def key(self) -> _Key:
        """Its key for other candidates; a rebuild may change the generation, so that is not part of it."""
        return self.id, self.uid

    @property
    def has_all_in_start(self) -> bool:
        """Whether its own sets are part of `start`: a rewind's note says no more of them, so its base is not enough."""
        return self.rewound_from is not None and self.manifest is None and not self.sets

    @classmethod
    def of_record(cls, record: CheckpointRecord, handle: SegmentHandle, stored_ms: int) -> CheckpointCandidate:
        """Return the candidate of the record in the note at `handle`."""
        return cls(
            id=record.checkpoint_id,
            stored_as=handle.object_key.rsplit("/", 1)[1],
            created_ms=stored_ms,
            sets=record.sets,
            start=StateView((), []) if record.base is None and record.start is None else record.start,
            note=handle,
            is_kept=record.rewound_from is not None or (record.forked_from is not None and record.base is None),
            planned_ms=record.planned_ms,
            **header_of(record),
        )

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> CheckpointCandidate:
        """Return the candidate of a manifest."""
        return cls(
            id=manifest.id,
            stored_as="",
            created_ms=manifest.created_ms,
            sets=tuple(NotedSet(handle.entry.id, handle.entry.checksum) for handle in manifest.segments),
            start=StateView(manifest.materializations, list(manifest.earlier)) if manifest.starts_chain else None,
            manifest=manifest,
            note=manifest.note,
            **header_of(manifest),
        )

    @classmethod
    def of_savepoint(cls, savepoint: Manifest) -> CheckpointCandidate:
        """Return the candidate of a savepoint: like a manifest, but it occupies no checkpoint's place."""
        return replace(cls.of_manifest(savepoint), manifest=None, is_kept=True)


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """
    The checkpoint to which a job can be restored.

    Args:
        path: The chosen checkpoint and those before it, newest first, back to one whose `start` is known; empty if no
            checkpoint is whole.
        is_proven: Whether the chosen one is known to have been completed.
        lost: Newer tries, with the reason why they cannot be restored.
        passed: Manifests on the path that name a lost start; the checkpoints before them replace it.
    """

    path: tuple[CheckpointCandidate, ...]
    is_proven: bool
    lost: tuple[tuple[str, str], ...]
    passed: tuple[tuple[Manifest, str], ...] = ()


def join_candidates(candidates: Iterable[CheckpointCandidate]) -> list[CheckpointCandidate]:
    """Join the notes and manifests of one candidate; the latest manifest has precedence, then the latest note."""
    joined: dict[_Key, CheckpointCandidate] = {}
    for one in sorted(candidates, key=lambda one: (one.manifest.generation if one.manifest else -1, one.stored_as)):
        known = joined.get(one.key)
        if known is not None:
            one = replace(  # noqa: PLW2901
                one, start=one.start or known.start, note=one.note or known.note, is_kept=one.is_kept or known.is_kept
            )
        joined[one.key] = one
    return list(joined.values())


def proven_keys(candidates: Iterable[CheckpointCandidate]) -> set[_Key]:
    """Return the keys of the candidates that existed (rule 1)."""
    candidates = list(candidates)
    named = {(one.base.id, one.base.uid) for one in candidates if one.base is not None}
    return named | {one.key for one in candidates if one.manifest is not None or one.is_kept}


def choose(
    candidates: Sequence[CheckpointCandidate],
    registry: Registry,
    stored: Stored,
    damaged_snapshots: Mapping[str, str] = MappingProxyType({}),
    up_to: int | None = None,
) -> RecoveryPlan:
    """
    Choose the checkpoint to restore.

    Args:
        candidates: All of one life of the job, joined.
        registry: The readable part of the registry; its fences tell where epochs began.
        stored: The sound stored segments.
        damaged_snapshots: Index keys of snapshots that cannot be restored, with the reason.
        up_to: Choose no newer checkpoint.
    """
    current = not_fenced(candidates, registry)
    proven = proven_keys(current)
    proven_ids = {checkpoint_id for checkpoint_id, _ in proven}
    valid = [one for one in current if one.key in proven or one.id not in proven_ids]
    eligible = [one for one in valid if up_to is None or one.id <= up_to]
    eligible.sort(key=lambda one: (one.id, one.key in proven, one.epoch, one.planned_ms, one.stored_as), reverse=True)
    walk = _Walk({one.key: one for one in candidates}, stored, damaged_snapshots)
    lost: list[tuple[str, str]] = []
    for one in eligible:
        path = walk.path(one)
        if path is not None:
            return RecoveryPlan(path, one.key in proven, tuple(lost), tuple(walk.passed(path)))
        lost.append((f"{one.id} ({one.uid})", walk.reason(one)))
    return RecoveryPlan((), False, tuple(lost))


class _Walk:
    """Walks from checkpoints back to a known start, and caches failures."""

    def __init__(
        self, candidates: Mapping[_Key, CheckpointCandidate], stored: Stored, damaged_snapshots: Mapping[str, str]
    ) -> None:
        self._candidates = candidates
        self._stored = stored
        self._damaged_snapshots = damaged_snapshots
        self._broken: dict[_Key, str] = {}

    def path(self, one: CheckpointCandidate) -> tuple[CheckpointCandidate, ...] | None:
        """Return the path from `one` back to a known start, or None if something on it is missing."""
        path: list[CheckpointCandidate] = []
        reasons: list[str] = []  # the first one is nearest to `one`
        step: CheckpointCandidate | None = one
        while step is not None:
            path.append(step)
            reason = self._broken.get(step.key) or self._missing_sets(step)
            if reason is not None:
                reasons.append(reason)
                break
            if step.start is not None:
                reason = self._missing_at_start(step.start)
                if reason is None:
                    return tuple(path)
                reasons.append(reason)
            before = None
            if step.base is not None and not step.has_all_in_start:
                before = self._candidates.get((step.base.id, step.base.uid))
                if before is None:
                    reasons.append(f"neither note nor manifest of checkpoint {step.base.to_text()} is stored")
            step = before
        for passed in path:
            self._broken.setdefault(passed.key, reasons[0])
        return None

    def reason(self, one: CheckpointCandidate) -> str:
        """Return why there is no path from `one`."""
        return self._broken[one.key]

    def passed(self, path: Iterable[CheckpointCandidate]) -> Iterator[tuple[Manifest, str]]:
        """Yield the manifests on a path whose own start is lost, with the reason."""
        for one in path:
            if one.manifest is not None and one.manifest.starts_chain and one.start is not None:
                reason = self._missing_at_start(one.start)
                if reason is not None:
                    yield one.manifest, reason

    def _missing_sets(self, one: CheckpointCandidate) -> str | None:
        return next((describe_missing(noted) for noted in one.sets if find_set(self._stored, noted) is None), None)

    def _missing_at_start(self, start: StateView) -> str | None:
        for materialization in start.materializations:
            if (reason := self._damaged_snapshots.get(materialization.index_key)) is not None:
                return reason
        for handle in start.log:
            noted = NotedSet(handle.entry.id, handle.entry.checksum)
            if find_set(self._stored, noted) is None:
                return f"{describe_missing(noted)}, once in object {handle.object_key}"
        return None


def not_fenced(candidates: Sequence[CheckpointCandidate], registry: Registry) -> list[CheckpointCandidate]:
    """Return the candidates without those that a higher epoch fenced (rule 3)."""
    began: dict[int, int] = {}
    for epoch, place in [(one.epoch, one.id) for one in candidates] + [
        (manifest.epoch, manifest.id) for manifest in registry.manifests.values()
    ]:
        began[epoch] = min(place, began.get(epoch, place))
    fenced_from: dict[int, int] = {}
    lowest: int | None = None
    for epoch in sorted(began, reverse=True):
        if lowest is not None:
            fenced_from[epoch] = lowest
        lowest = began[epoch] if lowest is None else min(lowest, began[epoch])
    return [one for one in candidates if one.id < fenced_from.get(one.epoch, one.id + 1)]


def find_set(stored: Stored, noted: NotedSet) -> SegmentHandle | None:
    """Return the handle of a stored change set with the noted checksum, or None."""
    for handle in stored.get(noted.id, ()):
        if handle.entry.checksum == noted.checksum:
            return handle
        if noted.checksum is None and handle.entry.kind is SegmentKind.CHANGES:
            return handle
    return None


def describe_missing(noted: NotedSet) -> str:
    """Return the message for a missing change set."""
    return (
        f"change set {noted.id.sqn} of partition {noted.id.partition} of {noted.id.operator!r}, checkpoint "
        f"{noted.id.checkpoint_id}, attempt {noted.id.writer.attempt}, is missing or damaged"
    )


def is_restorable(registry: Registry, newest: Manifest) -> bool:
    """Return whether the newest checkpoint's manifests are all sound."""
    if registry.newest != newest:
        return False
    try:
        for _ in registry.chain(newest):
            pass
    except CorruptDataError:
        return False
    return True
