"""
Which checkpoints are kept, as decisions: retention, subsumption, and what may be deleted then.

The newest `checkpoints_max` checkpoints are *retained*; older ones are *subsumed*. A retained delta manifest needs all
manifests back to a complete one, so those stay as well, and with them all that they name: it is part of the retained
checkpoint's state. Whatever only older manifests name is deleted with them, after a delay in which a reader that
began before may end (I11). A manifest goes before its objects, so that every manifest that exists is whole.
No I/O but in `retained_manifests`.
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
    """What is kept of a job's past."""

    checkpoints_max: int = CHECKPOINTS_MAX
    """Completed checkpoints that stay restorable; savepoints do not count."""
    delay_s: int = 60
    """How long after it was subsumed a checkpoint's state is deleted."""

    def __post_init__(self) -> None:
        if self.checkpoints_max < 1:
            raise InvalidInputError(f"retention checkpoints_max must be at least 1, it is {self.checkpoints_max}")
        if self.delay_s < 0:
            raise InvalidInputError(f"retention delay_s must not be negative, it is {self.delay_s}")


@dataclass(frozen=True, slots=True)
class Deletion:
    """What was subsumed and may be deleted from `due_ms` on: manifests first, then objects."""

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
        is_complete = manifest.starts_chain
        return cls(manifest.ref, is_complete, frozenset(object_keys(manifest)))


class RetentionTracker:
    """The manifests of one job that a coordinator knows to exist, oldest first, from a complete one on."""

    def __init__(self, settings: RetentionSettings) -> None:
        self._settings = settings
        self._entries: deque[_Entry] = deque()
        self._deletions: deque[Deletion] = deque()

    @property
    def newest(self) -> CheckpointRef | None:
        """The checkpoint that was completed last, or None while nothing is known."""
        return self._entries[-1].ref if self._entries else None

    @property
    def waiting(self) -> int:
        """How many objects wait for their deletion."""
        return sum(len(deletion.object_keys) for deletion in self._deletions)

    @property
    def spared(self) -> list[CheckpointRef]:
        """The manifests that are needed, or whose deletion is not due yet."""
        waiting = [ref for deletion in self._deletions for ref in deletion.manifests]
        return [*waiting, *(entry.ref for entry in self._entries)]

    def begin(self, newest_first: Iterable[Manifest]) -> None:
        """
        Start anew from a chain of manifests; takes from it what retention needs to know.

        Raises:
            CorruptDataError: See `manifests_to_keep`.
        """
        self._deletions.clear()
        kept = manifests_to_keep(newest_first, self._settings.checkpoints_max)
        self._entries = deque(_Entry.of(manifest) for manifest in reversed(kept))

    def completed(self, manifest: Manifest, now_ms: int) -> None:
        """
        Take a new checkpoint in, and decide what it subsumes.

        Its base must be `newest`: other histories are for the garbage collector.
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
        """Forget all: the job has another owner."""
        self._deletions.clear()
        self._entries.clear()

    def take_due(self, now_ms: int) -> list[Deletion]:
        """Return the deletions whose time has come; they are not returned again."""
        due = []
        while self._deletions and self._deletions[0].due_ms <= now_ms:
            due.append(self._deletions.popleft())
        return due


def manifests_to_keep(newest_first: Iterable[Manifest], checkpoints_max: int) -> list[Manifest]:
    """
    Return the manifests, newest first, that the retained checkpoints of a chain need.

    Raises:
        CorruptDataError: The chain breaks off before a complete manifest, so not even the newest is whole.
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
        raise CorruptDataError(f"the chain of manifests breaks off at checkpoint {kept[-1].id}")
    return kept[:whole]


def retained_manifests(job_store: JobStore, checkpoints_max: int) -> list[Manifest]:
    """
    Return the manifests, newest first, that the retained checkpoints of a job need; reads them, and blocks.

    Raises:
        CorruptDataError: See `manifests_to_keep`.
    """
    newest = job_store.newest()
    while newest is not None:
        try:
            return manifests_to_keep(job_store.stored_chain(newest.ref), checkpoints_max)
        except CorruptDataError:
            # Read so slowly that it was deleted meanwhile?
            before, newest = newest, job_store.newest()
            if newest == before:
                raise
    return []
