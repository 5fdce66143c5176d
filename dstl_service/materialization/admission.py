"""
The coordinator's gate: which of the snapshots that tasks report a checkpoint takes into its state or lists.

A stored snapshot is taken only while the base lists it as under way (`dstl_service.formats.under_way`), and while the
base's state has all its parents (I11). A snapshot that does not belong to the state is refused and counted, never an
error: a checkpoint does not depend on it (I13). Only data that is neither an announcement nor a handle is the caller's
error (`check_form`). A snapshot refused for good leaves the list, so that its table is stored again.

A handle costs one request, once: an index never changes, and is cached. The oldest snapshots come first, whatever their
key groups, so each gets its turn. Blocking I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from dstl_service.formats.materialization_index import index_key
from dstl_service.formats.under_way import Announcement, is_announcement
from dstl_service.registry.job_store import JobStore
from dstl_service.restore.truncation import Counting
from dstl_service.wire import CheckpointRef
from storage.clock import Clock
from storage.errors import CorruptDataError, DstlError, InvalidInputError, UnavailableError
from storage.model import MaterializationHandle

AT_ONCE_MAX = 16

logger = logging.getLogger("dstl_service")

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Reported:
    """A checkpoint's decision on reported snapshots: taken, announced (listed from now on), refused for good."""

    taken: Sequence[MaterializationHandle] = ()
    announced: Sequence[Announcement] = ()
    refused: Collection[str] = ()
    refusals: int = 0


def choose_materializations(
    job_store: JobStore,
    job: str,
    base: CheckpointRef,
    reported: Sequence[dict[str, Any]],
    clock: Clock,
    patience_ms: int,
    at_once: int = AT_ONCE_MAX,
) -> Reported:
    """
    Decide on the snapshots reported to the checkpoint after `base`.

    Args:
        job_store: The job's manifests.
        job: Its name.
        base: The checkpoint on which the new one builds.
        reported: Announcements, and handles of stored snapshots; several attempts may report the same one.
        clock: For `patience_ms`.
        patience_ms: No further index is read after this time; remaining handles are reported again.
        at_once: Indexes read in parallel.
    """
    gate = _Gate(job_store, job, base)
    announced, handles, refusals = gate.sorted_out(reported)
    until_ms = clock.monotonic_ms() + patience_ms

    def check(handle: MaterializationHandle) -> DstlError | None:
        if clock.monotonic_ms() > until_ms and not job_store.indexes.knows(handle):
            return UnavailableError("there was no time to check it")
        try:
            gate.check_index(handle)
        except DstlError as error:
            return error
        return None

    oldest_first = sorted(handles, key=lambda handle: (handle.checkpoint_id, handle.uid))
    taken, refused = [], set()
    for handle, why_not in zip(oldest_first, _each(check, oldest_first, at_once), strict=True):
        if why_not is None:
            taken.append(handle)
        elif isinstance(why_not, InvalidInputError | CorruptDataError):
            refused.add(handle.uid)
            logger.warning("materialization refused", extra={"job": job, "error": str(why_not)})
    return Reported(taken, announced, refused, refusals + len(refused))


def check_form(reported: Sequence[Any]) -> None:
    """
    Check that all reports are announcements or handles of snapshots.

    Raises:
        InvalidInputError: One is neither; names its index.
    """
    for number, data in enumerate(reported):
        try:
            Announcement.from_dict(data) if is_announcement(data) else MaterializationHandle.from_dict(data)
        except InvalidInputError as error:
            raise InvalidInputError(f"materializations.{number} of the request is not valid: {error}") from error


class _Gate:
    """Knows the base of a checkpoint, and raises why a report is refused."""

    def __init__(self, job_store: JobStore, job: str, base: CheckpointRef) -> None:
        state = job_store.state(base)
        self._ancestors = _Ancestors(job_store.ancestors(base))
        self._job_store = job_store
        self._job = job
        self._base = base
        self._counting = Counting(state)
        self._listed = {item.uid: item for item in job_store.resolve(base).under_way.snapshots}
        self.taken = {item.uid for item in state.materializations}

    def sorted_out(
        self, reported: Sequence[dict[str, Any]]
    ) -> tuple[list[Announcement], Collection[MaterializationHandle], int]:
        """Return the valid announcements, the handles that may be taken, each once, and how many were refused."""
        announced: list[Announcement] = []
        handles: dict[str, MaterializationHandle] = {}
        why_not, refusals = "", 0
        for data in reported:
            try:
                if is_announcement(data):
                    announced.append(self.announced(data))
                elif (handle := MaterializationHandle.from_dict(data)).uid not in self.taken:
                    self.check_listed(handle)
                    handles[handle.uid] = handle
            except DstlError as error:
                why_not, refusals = why_not or str(error), refusals + 1
        if refusals:  # one line: a request may report any number
            logger.warning("materialization refused", extra={"job": self._job, "error": why_not, "number": refusals})
        return announced, handles.values(), refusals

    def announced(self, data: dict[str, Any]) -> Announcement:
        """Return a valid announcement: made for this base, of a table at one of its ancestors."""
        announcement = Announcement.from_dict(data)
        version = announcement.snapshot.version
        if announcement.base != self._base:
            raise InvalidInputError(
                f"materialization {announcement.snapshot.uid} was announced for the checkpoint after "
                f"{announcement.base.to_text()}, not after {self._base.to_text()}"
            )
        if not self._ancestors.include(version):
            raise InvalidInputError(
                f"materialization {announcement.snapshot.uid} is of checkpoint {version.to_text()}, which is not "
                f"an ancestor of {self._base.to_text()}"
            )
        return announcement

    def check_listed(self, handle: MaterializationHandle) -> None:
        """Raise `InvalidInputError` if the base does not list the handle; no request."""
        listed = self._listed.get(handle.uid)
        if listed is None or not listed.is_of(handle):
            raise InvalidInputError(
                f"materialization {handle.uid} is not under way at checkpoint {self._base.to_text()}, so its objects "
                "may be gone"
            )
        if handle.index_key != index_key(self._job, handle.operator, handle.key_groups, handle.uid):
            raise InvalidInputError(f"{handle.index_key} is not an index of job {self._job!r}")

    def check_index(self, handle: MaterializationHandle) -> None:
        """Raise if the index of a listed handle does not fit the state; the first check takes one request."""
        if not self._counting.would_count(handle):
            raise InvalidInputError(f"materialization {handle.uid} is not newer than the state's own")
        index = self._job_store.indexes.read(handle)
        if index.job_uid != self._job_store.job_uid or index.version != self._listed[handle.uid].version:
            raise InvalidInputError(f"materialization {handle.uid} is not the one that was announced")
        if not self.taken.issuperset(index.parents):
            raise InvalidInputError(f"materialization {handle.uid} reuses files of one that is no longer in the state")


class _Ancestors:
    """
    Knows the checkpoints that lead to a base; each is looked up once, however many reports name old ones.

    Args:
        newest_first: The base and those before it.
    """

    def __init__(self, newest_first: Iterator[CheckpointRef]) -> None:
        self._newest_first = newest_first
        self._found: dict[int, CheckpointRef] = {}

    def include(self, ref: CheckpointRef) -> bool:
        """Return whether a checkpoint is among them; after an error only those count that were found before."""
        while ref.id not in self._found and (step := next(self._newest_first, None)) is not None:
            self._found[step.id] = step
            if step.id < ref.id:
                break
        return self._found.get(ref.id) == ref


def _each(check: Callable[[T], R], items: Sequence[T], at_once: int) -> Iterable[R]:
    """Yield the result of `check` for each item, in order."""
    if at_once <= 1 or len(items) <= 1:
        return map(check, items)
    with ThreadPoolExecutor(min(at_once, len(items)), thread_name_prefix="check") as threads:
        return list(threads.map(check, items))
