"""
Uploads batches: each becomes one segment object, put by attempts that may overlap.

An attempt that exceeds its time-out goes on while the next one starts; the first to finish wins. The first attempt is
joined earlier if it takes longer than most (`hedging`). All write the same bytes to the same key, so a loser needs no
clean-up (I6). Errors are retried after a delay, except those that cannot pass. Handles are given out only after the
store acknowledged the close of the object (I5).

A hung store cannot starve other uploads: an upload releases its slot as soon as an attempt is late, and the attempts
that run at once are bounded, for each job and over all; the store's own time-outs end each of them. The attempts of an
upload hold its payloads in memory until `Upload.ended`. An attempt that succeeds after its upload was given up still
counts.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from dstl_service.process.fair_slots import FairSlots
from dstl_service.process.shares import SharedRoom, shares_of
from dstl_service.uploads.hedging import Hedging
from storage.checksum import BytesLike
from storage.clock import IdSource
from storage.errors import DstlError, UnavailableError
from storage.model import Segment, SegmentHandle
from storage.object_store import ObjectStore
from storage.retry_policy import RetryPolicy, is_retryable
from storage.segment_format import encode_object

ATTEMPTS_RUNNING_MAX = 96
"""Most attempts, and thus threads, that run at once; far more than the slots need unless the store hangs."""


def slots_in_all(slots: int) -> int:
    """Return the number of upload slots over all jobs if one job may have `slots`; see `process.shares`."""
    return 2 * slots


class ThreadPerCall(Executor):
    """
    Runs every call in a thread of its own: a hung call blocks no other (I6).

    The threads are daemons, so a hung call does not keep a stopping process alive.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                result = function(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
                future.set_exception(error)
            else:
                future.set_result(result)

        future.set_running_or_notify_cancel()
        threading.Thread(target=run, name=self._name, daemon=True).start()
        return future


class Uploader:
    """
    Stores batches of change sets as segment objects of one host. Owned by the event loop.

    Args:
        store: Takes the objects.
        executor: Runs attempts, and must never queue them.
        policy: When an attempt is late, and how many attempts there are.
        ids: Names the objects.
        host_id: Part of the object keys.
        slots: Uploads of one job that run at the same time, without those with a late attempt; see `slots_in_all`.
        attempts_running_max: Attempts that run at the same time; one job has at most half of them.
        hedge_share_max: Early attempts per upload, at most; see `hedging`.
    """

    def __init__(
        self,
        store: ObjectStore,
        executor: Executor,
        policy: RetryPolicy,
        ids: IdSource,
        host_id: str,
        *,
        slots: int = 5,
        attempts_running_max: int = ATTEMPTS_RUNNING_MAX,
        hedge_share_max: float = 0.0,
    ) -> None:
        self.policy = policy
        self.hedging = Hedging(hedge_share_max)
        self.slots = FairSlots(slots_in_all(slots))
        self._running = SharedRoom(shares_of(attempts_running_max))
        self._store = store
        self._executor = executor
        self._ids = ids
        self._host_id = host_id

    @property
    def attempts_running(self) -> int:
        """Number of running attempts, of all jobs."""
        return self._running.held

    def begin(self, job: str, segments: Sequence[Segment], name: str | None = None) -> Upload:
        """
        Encode the sets as one object; `Upload.stored` puts it.

        Args:
            job: Name of the sets' job.
            segments: The sets.
            name: Name of the object in its host's folder, never used before; by default a new id.

        Raises:
            DstlError: The sets cannot be encoded.
        """
        buffers, entries = encode_object(segments)
        object_size_bytes = sum(len(buffer) for buffer in buffers)
        self.hedging.upload_begins()
        key = f"{job}/segments/{self._host_id}/{name or self._ids.unique_id()}.seg"
        handles = [SegmentHandle(key, object_size_bytes, entry) for entry in entries]
        return Upload(self, job, key, buffers, handles, object_size_bytes)

    def admits(self, job: str) -> bool:
        """Return whether another attempt of the job may start now."""
        return self._running.admits(job, 1)

    def attempt(self, job: str, key: str, buffers: Sequence[BytesLike]) -> asyncio.Future[str | None]:
        """Start to put an object; the result is None or the text of a retryable error; other errors are raised."""
        loop = asyncio.get_running_loop()
        if not self.admits(job):
            refused: asyncio.Future[str | None] = loop.create_future()
            refused.set_result(
                f"{self.attempts_running} attempts hang already, {self._running.held_by(job)} of this job; the store "
                "does not answer"
            )
            return refused
        running = loop.run_in_executor(self._executor, self._put, key, buffers)
        self._running.take(job, 1)
        running.add_done_callback(partial(self._attempt_ended, job))
        return running

    def _put(self, key: str, buffers: Sequence[BytesLike]) -> str | None:
        try:
            self._store.put(key, buffers)
        except DstlError as error:
            if not is_retryable(error):
                raise
            return str(error)  # not the error: its traceback would keep the payloads in memory
        return None

    def _attempt_ended(self, job: str, attempt: asyncio.Future[str | None]) -> None:
        self._running.give_back(job, 1)
        if not attempt.cancelled():
            attempt.exception()  # marks it as retrieved: a loser's outcome is not awaited


class Upload:
    """The upload of one object. Made by `Uploader.begin`; call `stored`, then `ended`."""

    def __init__(
        self,
        uploader: Uploader,
        job: str,
        key: str,
        buffers: Sequence[BytesLike],
        handles: list[SegmentHandle],
        size_bytes: int,
    ) -> None:
        self.handles = handles
        self.attempts = 0
        """Number of attempts begun."""
        self.hedges = 0
        """How many of them began early, because the first one took longer than most; 0 or 1."""
        self.winner = 0
        """Number of the attempt that stored the object, 1 for the first; 0 while none has."""
        self._uploader = uploader
        self._job = job
        self._key = key
        self._buffers = buffers
        self._size_bytes = size_bytes
        self._running: dict[asyncio.Future[str | None], int] = {}

    @property
    def tries(self) -> int:
        """Number of attempts begun that the retry policy counts."""
        return self.attempts - self.hedges

    async def stored(self) -> list[SegmentHandle]:
        """
        Put the object; return its handles, in the order of the sets.

        Raises:
            UnavailableError: All attempts failed or are late; nothing of the batch counts as stored.
            DstlError: An attempt failed with an error that cannot pass; nothing of the batch counts as stored.
        """
        await self._uploader.slots.acquire(self._job)
        has_slot = True
        policy = self._uploader.policy
        last_error: str | None = None
        try:
            while True:
                is_first = not self.attempts
                if self.tries < policy.attempts_max:
                    self._begin_attempt()
                elif not self._running:
                    raise UnavailableError(
                        f"object {self._key} could not be stored in {self.attempts} attempts: {last_error}"
                    )
                wait = self._end_of_first if is_first else self._end_of_some
                done = await wait(policy.timeout_ms / 1000)
                errors = [attempt.result() for attempt in done]  # raises an error that cannot pass
                if self.winner:
                    return self.handles
                if errors:
                    last_error = errors[-1]
                elif has_slot:
                    # Late: from now on this upload does not hold up others.
                    self._uploader.slots.release(self._job)
                    has_slot = False
                if not done and self.tries >= policy.attempts_max:
                    raise UnavailableError(
                        f"object {self._key} was not stored within {policy.timeout_ms * self.tries} ms "
                        f"in {self.attempts} attempts"
                    )
                if done and self.tries < policy.attempts_max:
                    await asyncio.sleep(policy.delay_after_error_ms / 1000)
        finally:
            if has_slot:
                self._uploader.slots.release(self._job)

    async def ended(self) -> bool:
        """Wait until no attempt runs any more; say whether a late one stored the object after all."""
        was_stored = self.winner > 0
        while self._running:
            await self._end_of_some(None)
        self._buffers = ()
        return self.winner > 0 and not was_stored

    def _begin_attempt(self) -> None:
        self.attempts += 1
        attempt = self._uploader.attempt(self._job, self._key, self._buffers)
        self._running[attempt] = self.attempts
        attempt.add_done_callback(partial(self._measure, asyncio.get_running_loop().time()))

    def _measure(self, begun_s: float, attempt: asyncio.Future[str | None]) -> None:
        if not attempt.cancelled() and attempt.exception() is None and attempt.result() is None:
            duration_s = asyncio.get_running_loop().time() - begun_s
            self._uploader.hedging.attempt_ended(self._size_bytes, duration_s * 1000)

    async def _end_of_first(self, timeout_s: float | None) -> set[asyncio.Future[str | None]]:
        """Like `_end_of_some`; if the wait gets longer than most, begin an early attempt meanwhile."""
        hedging = self._uploader.hedging
        delay_ms = hedging.delay_ms(self._size_bytes)
        if timeout_s is None or delay_ms is None or delay_ms / 1000 >= timeout_s:
            return await self._end_of_some(timeout_s)
        done = await self._end_of_some(delay_ms / 1000)
        if done:
            return done
        if self._uploader.admits(self._job) and hedging.take():
            self.hedges += 1
            self._begin_attempt()
        return await self._end_of_some(timeout_s - delay_ms / 1000)

    async def _end_of_some(self, timeout_s: float | None) -> set[asyncio.Future[str | None]]:
        """Wait until an attempt ends or the time is over; return the ended ones, and note the winner."""
        done, _ = await asyncio.wait(self._running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for attempt in done:
            number = self._running.pop(attempt)
            if attempt.exception() is None and attempt.result() is None:
                self.winner = self.winner or number
        return done
