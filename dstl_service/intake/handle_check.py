"""
Checks that handles from others match stored objects: a checkpoint names only objects that were read (I5).

Handles of this service's own uploads, and those in its peers' answers, are not looked up in the store. Handles in a
request, from a task whose sidecar other hosts cannot reach, are compared with the index of their object: once per
object, in parallel, and already when the checkpoint is flushed. A request may name any number of objects that do not
exist, so few of them are looked for at a time.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from typing import Any, TypeAlias

from dstl_service.wire import NAME, ChangeSetRef
from storage.errors import CorruptDataError, InvalidInputError, LostChangesError, NotFoundError
from storage.model import SegmentEntry, SegmentHandle, SegmentKind
from storage.object_store import ObjectStore, validate_key
from storage.segment_reader import read_index

_KEY = re.compile(rf"({NAME})/segments/{NAME}/{NAME}\.seg")
_ENTRIES_KNOWN_MAX = 100_000

LOOKS_AHEAD_MAX = 1_000
"""Objects of one job that wait to be read before a request waits for them."""

LOOKS_AT_ONCE = 250
"""Objects that one request waits for at a time; fewer threads than that read them."""

_Index: TypeAlias = tuple[int, frozenset[SegmentEntry]]
"""Size of an object in bytes, and its index entries."""


def checked_handle(job: str, ref: ChangeSetRef, handle: SegmentHandle) -> SegmentHandle:
    """
    Return a set's handle that came from outside, if it is one of this set.

    Raises:
        InvalidInputError: The handle belongs to another set, or its key is not that of a segment object of the job.
    """
    set_id = ref.change_set_id(job)
    if not is_of_job(job, handle) or handle.entry.id != set_id or handle.entry.kind is not SegmentKind.CHANGES:
        raise InvalidInputError(f"the handle in {handle.object_key[:200]!r} does not belong to change set {set_id}")
    return handle


def is_of_job(job: str, handle: SegmentHandle) -> bool:
    """Say whether a handle names a segment object of this job."""
    key = _KEY.fullmatch(handle.object_key)
    return key is not None and key[1] == job and bool(validate_key(handle.object_key))


class HandleCheck:
    """
    Reads the indexes of objects that handles name. Owned by the event loop.

    Args:
        store: The store of the objects.
        look: Runs a job's blocking call; bounds how many run at a time.
    """

    def __init__(self, store: ObjectStore, look: Callable[..., Awaitable[Any]]) -> None:
        self._store = store
        self._look = look
        self._indexes: OrderedDict[str, asyncio.Task[_Index]] = OrderedDict()
        self._entries_known = 0
        self._waiting: Counter[str] = Counter()

    def begin(self, job: str, handles: Iterable[SegmentHandle]) -> None:
        """Start to read the indexes that `check` is going to need, as long as not too many wait."""
        for key in _by_object(handles):
            if self._waiting[job] >= LOOKS_AHEAD_MAX:
                return
            self._begin(job, key)

    async def check(self, job: str, handles: Iterable[SegmentHandle]) -> None:
        """
        Check that all of these handles match their objects.

        Raises:
            LostChangesError: An object is missing; the batch must be executed again.
            InvalidInputError: An object does not match a handle.
        """
        left = iter(_by_object(handles).items())
        while objects := dict(islice(left, LOOKS_AT_ONCE)):
            indexes = await asyncio.gather(*(asyncio.shield(self._index(job, key)) for key in objects))
            for (key, owned), (size_bytes, entries) in zip(objects.items(), indexes, strict=True):
                for handle in owned:
                    if handle.object_size_bytes != size_bytes or handle.entry not in entries:
                        raise InvalidInputError(
                            f"object {key} does not hold change set {handle.entry.id} as described by its handle"
                        )

    def _index(self, job: str, key: str) -> asyncio.Task[_Index]:
        self._begin(job, key)
        self._indexes.move_to_end(key)
        return self._indexes[key]

    def _begin(self, job: str, key: str) -> None:
        if key not in self._indexes:
            task = self._indexes[key] = asyncio.get_running_loop().create_task(self._read(job, key))
            self._waiting[job] += 1
            task.add_done_callback(lambda done: self._ended(job, key, done))

    async def _read(self, job: str, key: str) -> _Index:
        try:
            index: _Index = await self._look(job, self._stored_index, key)
        except NotFoundError:
            raise LostChangesError(
                f"object {key}, named by a handle of this checkpoint, does not exist; the batch must be executed again",
                job=job,
            ) from None
        except CorruptDataError as error:
            raise InvalidInputError(f"a handle of this checkpoint names a damaged segment object: {error}") from None
        return index

    def _stored_index(self, key: str) -> _Index:
        size_bytes = self._store.head(key).size_bytes
        return size_bytes, frozenset(read_index(self._store, key, size_bytes))

    def _ended(self, job: str, key: str, task: asyncio.Task[_Index]) -> None:
        self._waiting[job] -= 1
        if not self._waiting[job]:
            del self._waiting[job]
        if task.cancelled() or task.exception() is not None:
            del self._indexes[key]  # the next check reads again
            return
        self._entries_known += len(task.result()[1])
        while self._entries_known > _ENTRIES_KNOWN_MAX and (oldest := next(iter(self._indexes))) != key:
            dropped = self._indexes[oldest]
            if not dropped.done():
                return
            del self._indexes[oldest]
            self._entries_known -= len(dropped.result()[1])


def _by_object(handles: Iterable[SegmentHandle]) -> dict[str, list[SegmentHandle]]:
    objects: defaultdict[str, list[SegmentHandle]] = defaultdict(list)
    for handle in handles:
        objects[handle.object_key].append(handle)
    return dict(objects)
