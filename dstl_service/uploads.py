"""
Performs batches: encodes one segment object and stores it, with attempts that may overlap.

An attempt that has not finished in time goes on while the next one starts; the first to finish wins, and since all
write the same bytes to the same key, a loser needs no clean-up (I6). Errors are retried after a delay, except those
that will not go away. A handle exists only after the store acknowledged the close of the object (I5).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from storage.checksum import BytesLike
from storage.clock import IdSource
from storage.errors import DstlError, UnavailableError
from storage.model import Segment, SegmentHandle
from storage.object_store import ObjectStore
from storage.retry_policy import RetryPolicy, is_retryable
from storage.segment_format import encode_object


class ThreadPerCall(Executor):
    """
    Runs every call in a thread of its own: one that hangs for ever takes no place from others (I6).

    The threads are daemons, so a hung call does not keep a stopping process alive either.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                result = function(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - whoever waits raises it
                future.set_exception(error)
            else:
                future.set_result(result)

        future.set_running_or_notify_cancel()
        threading.Thread(target=run, name=self._name, daemon=True).start()
        return future


class Uploader:
    """Stores batches of change sets as segment objects of one host."""

    def __init__(
        self, store: ObjectStore, executor: Executor, policy: RetryPolicy, ids: IdSource, host_id: str
    ) -> None:
        self._store = store
        self._executor = executor
        self._policy = policy
        self._ids = ids
        self._host_id = host_id

    async def upload(self, job: str, segments: Sequence[Segment]) -> tuple[list[SegmentHandle], int]:
        """
        Store the sets as one object; return their handles in order, and how many attempts were begun.

        Raises:
            DstlError: All attempts failed; nothing of the batch counts as stored.
        """
        buffers, entries = encode_object(segments)
        object_size_bytes = sum(len(buffer) for buffer in buffers)
        key = f"{job}/segments/{self._host_id}/{self._ids.unique_id()}.seg"
        attempts = await self._put(key, buffers)
        return [SegmentHandle(key, object_size_bytes, entry) for entry in entries], attempts

    async def _put(self, key: str, buffers: Sequence[BytesLike]) -> int:
        loop = asyncio.get_running_loop()
        running: set[asyncio.Future[None]] = set()
        started = 0
        last_error: BaseException | None = None
        try:
            while True:
                if started < self._policy.attempts_max:
                    running.add(loop.run_in_executor(self._executor, self._store.put, key, buffers))
                    started += 1
                elif not running:
                    raise UnavailableError(f"object {key} could not be stored in {started} attempts: {last_error}")
                timeout_s = self._policy.timeout_ms / 1000
                done, running = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                for attempt in done:
                    last_error = attempt.exception()
                    if last_error is None:
                        return started
                    if not isinstance(last_error, DstlError) or not is_retryable(last_error):
                        raise last_error
                if not done and started >= self._policy.attempts_max:
                    raise UnavailableError(
                        f"object {key} was not stored within {timeout_s * started} s in {started} attempts"
                    )
                if done and started < self._policy.attempts_max:
                    await asyncio.sleep(self._policy.delay_after_error_ms / 1000)
        finally:
            for attempt in running:  # losers finish by themselves; nobody asks for their outcome
                attempt.add_done_callback(_ignore_outcome)


def _ignore_outcome(attempt: asyncio.Future[None]) -> None:
    if not attempt.cancelled():
        attempt.exception()
