"""
Decides which checkpoints are kept: retention, subsumption, and the deletions that follow.

The newest `checkpoints_max` checkpoints are *retained*; older ones are *subsumed*. A retained delta manifest needs all
manifests back to a complete one, so those stay as well, with all objects that they name: they are part of the retained
checkpoint's state. Objects that only older manifests name are deleted with them, after a delay in which earlier readers
may finish (I11). A manifest is deleted before its objects, so that every existing manifest is whole. No I/O except in
`retained_manifests`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from dstl_service.formats.manifest import Manifest, object_keys
from dstl_service.registry.job_store import JobStore
from dstl_service.wire import CheckpointRef
from storage.errors import CorruptDataError, InvalidInputError

CHECKPOINTS_MAX = 10


@dataclass(frozen=True, slots=True)
class RetentionSettings:
    """How many checkpoints are kept, and how long subsumed ones are."""

    checkpoints_max: int = CHECKPOINTS_MAX
    """Completed checkpoints that stay restorable; savepoints do not count."""
    delay_s: int = 60
    """Seconds from a checkpoint's subsumption to the deletion of its state; a garbage collection does not wait for it
    if the checkpoint is older than `gc.age_min_s`."""

    def __post_init__(self) -> None:
        if self.checkpoints_max < 1:
            raise InvalidInputError(f"retention checkpoints_max must be at least 1, got {self.checkpoints_max}")
        if self.delay_s < 0:
            raise InvalidInputError(f"retention delay_s must not be negative, got {self.delay_s}")


@dataclass(frozen=True, slots=True)
class Deletion:
    """Subsumed state that may be deleted from `due_ms` (monotonic) on: manifests first, then objects."""

    due_ms: int
    manifests: tuple[CheckpointRef, ...]
    object_keys: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Entry:
    ref: CheckpointRef
    is_complete: bool
    object_keys: frozenset[str]

    @classmethod
    def of(cls, manifest: Manifest) -> _Entry:
        return cls(manifest.ref, manifest.starts_chain, frozenset(object_keys(manifest)))


class RetentionTracker:
    """Tracks the manifests of one job that a coordinator knows to exist, oldest first, from a complete one on."""

    def __init__(self, settings: RetentionSettings) -> None:
        self._settings = settings
        self._entries: deque[_Entry] = deque()
        self._deletions: deque[Deletion] = deque()

    @property
    def newest(self) -> CheckpointRef | None:
        """The newest known checkpoint, or None if none is known."""
        return self._entries[-1].ref if self._entries else None

    @property
    def waiting(self) -> int:
        """Number of objects whose deletion is pending."""
        return sum(len(deletion.object_keys) for deletion in self._deletions)

    @property
    def spared(self) -> list[CheckpointRef]:
        """The manifests that are needed, or whose deletion is not due yet."""
        waiting = [ref for deletion in self._deletions for ref in deletion.manifests]
        return [*waiting, *(entry.ref for entry in self._entries)]

    def begin(self, newest_first: Iterable[Manifest]) -> None:
        """
        Reset to a chain of manifests; reads from it only as far as retention needs.

        Raises:
            CorruptDataError: See `manifests_to_keep`.
        """
        self._deletions.clear()
        kept = manifests_to_keep(newest_first, self._settings.checkpoints_max)
        self._entries = deque(_Entry.of(manifest) for manifest in reversed(kept))

    def completed(self, manifest: Manifest, now_ms: int) -> None:
        """
        Add a new checkpoint, and decide which ones it subsumes.

        Its base must be `newest`; the garbage collector handles other histories.
        """
        self._entries.append(_Entry.of(manifest))
        oldest_retained = max(0, len(self._entries) - self._settings.checkpoints_max)
        keep_from = next((i for i in range(oldest_retained, -1, -1) if self._entries[i].is_complete), 0)
        if keep_from == 0:
            return
        dropped = [self._entries.popleft() for _ in range(keep_from)]
        kept = frozenset[str]().union(*(entry.object_keys for entry in self._entries))
        unneeded = frozenset[str]().union(*(entry.object_keys for entry in dropped)) - kept
        due_ms = now_ms + self._settings.delay_s * 1000
        self._deletions.append(Deletion(due_ms, tuple(entry.ref for entry in dropped), unneeded))

    def drop(self) -> None:
        """Forget everything: the job has another owner."""
        self._deletions.clear()
        self._entries.clear()

    def take_due(self, now_ms: int) -> list[Deletion]:
        """Return and remove the deletions that are due."""
        due = []
        while self._deletions and self._deletions[0].due_ms <= now_ms:
            due.append(self._deletions.popleft())
        return due


def manifests_to_keep(newest_first: Iterable[Manifest], checkpoints_max: int) -> list[Manifest]:
    """
    Return the manifests, newest first, that the retained checkpoints of a chain need.

    Raises:
        CorruptDataError: The chain ends before a complete manifest, so not even the newest is whole.
    """
    kept: list[Manifest] = []
    whole = 0
    for manifest in newest_first:
        kept.append(manifest)
        if manifest.starts_chain:
            whole = len(kept)
            if whole >= checkpoints_max:
                break
    if kept and not whole:
        raise CorruptDataError(f"the chain of manifests breaks off at checkpoint {kept[-1].id}; run `dstl fsck`")
    return kept[:whole]


def retained_manifests(job_store: JobStore, checkpoints_max: int) -> list[Manifest]:
    """
    Return the manifests, newest first, that the retained checkpoints of a job need; blocking reads.

    Raises:
        CorruptDataError: See `manifests_to_keep`.
    """
    newest = job_store.newest()
    while newest is not None:
        try:
            return manifests_to_keep(job_store.stored_chain(newest.ref), checkpoints_max)
        except CorruptDataError:
            # The chain may have been deleted while it was read.
            before, newest = newest, job_store.newest()
            if newest == before:
                raise
    return []
