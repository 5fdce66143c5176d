"""
Publishes the output of checkpoints in the background, oldest first, while the next batches are computed.

Each checkpoint is one Spark job with one task per slot, or a job per slot where Spark speculates; the next one starts
when all slots are published, so that records of one key keep their order even if the key moves to another slot. A
failed publish is repeated until it succeeds: nothing is lost meanwhile, because the log keeps unpublished output.
Batches wait while too much is left.

A driver whose job was taken over stops publishing: each of its tries would fence its successor's. So does one whose
Spark was stopped, in which no try can succeed. A try that is under way when its query has ended is given up after ten
seconds: a sink may wait without an end, and its tasks hold cores.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf

from backend_client.settings import SECONDS_MAX
from backend_client.sinks.slot_publishing import Target
from dstl_service.wire import RECENT_MAX, OperatorInfo
from storage.errors import ConflictError, DstlError, FencedError, InvalidInputError, UnavailableError

logger = logging.getLogger("backend_client")

_FIRST_PAUSE_S, _PAUSE_MAX_S = 0.5, 15.0
_REPORTED_EVERY_S = 60.0
_LOOK_EVERY_S, _GRACE_S = 1.0, 10.0
_TRACEBACK = "Traceback (most recent call last):"
_OVERTAKEN = (FencedError.__name__, ConflictError.__name__)
"""In the text of a task's error: another driver may be publishing."""

Publish = Callable[[Target], object]
"""Publishes all slots up to a checkpoint."""


@dataclass(frozen=True, slots=True)
class BacklogLimits:
    """
    How much may be unpublished before batches wait, and how long the end of a query waits for it.

    Args:
        checkpoints: Most checkpoints.
        size_bytes: Most bytes in the log; the last checkpoint may exceed it.
        patience_s: Seconds that a query's end, and a batch that must not begin before, wait for the sink.
    """

    checkpoints: int = 8
    size_bytes: int = 1 << 30
    patience_s: float = 600.0

    def __post_init__(self) -> None:
        for name, at_most in (("checkpoints", inf), ("size_bytes", inf), ("patience_s", SECONDS_MAX)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= at_most:
                bound = "" if at_most == inf else f" and at most {at_most}"
                raise InvalidInputError(f"{name} of a sink's backlog must be a number above 0{bound}, got {value!r}")


class Publisher:
    """
    Publishes one query's checkpoints in a thread of its own.

    Args:
        name: Name of the sink, for messages.
        publish: Publishes up to a checkpoint.
        limits: Bounds of the backlog.
        known: The sink as the job's newest checkpoint describes it; None if that does not.
        check_owned: Raises `FencedError` if the job is another driver's.
        give_up: Makes the call of `publish` that is under way fail.
        is_spark_stopped: Whether Spark has been stopped: no call of `publish` succeeds any more.
    """

    def __init__(
        self,
        name: str,
        publish: Publish,
        limits: BacklogLimits,
        known: OperatorInfo | None,
        check_owned: Callable[[], None] = lambda: None,
        give_up: Callable[[], None] = lambda: None,
        is_spark_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._name = name
        self._publish = publish
        self._check_owned = check_owned
        self._give_up = give_up
        self._is_spark_stopped = is_spark_stopped
        self._limits = limits
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Target, int]] = deque()
        self._error = ""
        self._is_closed = self._is_stopping = False
        self._is_first = self._has_spark = True
        self._fenced: FencedError | None = None
        self._recent = [] if known is None else known.recent
        self._thread: threading.Thread | None = None
        self.published = None if known is None else known.published
        """Id of the newest checkpoint whose output is published."""

    @property
    def backlog(self) -> tuple[int, int]:
        """Number of unpublished checkpoints, and bytes of their output in the log."""
        with self._changed:
            return len(self._waiting), sum(size for _, size in self._waiting)

    def described(self, info: OperatorInfo) -> OperatorInfo:
        """Return the sink as the next checkpoint describes it: up to where it has published, and what came after."""
        published = self.published
        with self._changed:
            self._recent = [ref for ref in self._recent if ref.id >= (published or 0)][-RECENT_MAX:]
            return replace(info, published=published, recent=self._recent)

    def submit(self, target: Target, size_bytes: int) -> None:
        """Have a checkpoint published; `size_bytes` is what its output takes in the log."""
        with self._changed:
            if target.checkpoint not in self._recent:
                self._recent = [*self._recent, target.checkpoint]
            self._waiting.append((replace(target, is_first=self._is_first), size_bytes))
            self._is_first = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="dstl-publisher", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait_for_room(self, *, until_empty: bool = False) -> None:
        """
        Wait until the next checkpoint's output may be added to the backlog; if asked for, until that is empty.

        Raises:
            UnavailableError: The query is being stopped.
            FencedError: Another driver took the job over, and publishes what is left.
        """

        def has_room() -> bool:
            if until_empty:
                return not self._waiting
            size_bytes = sum(size for _, size in self._waiting)
            return len(self._waiting) < self._limits.checkpoints and size_bytes < self._limits.size_bytes

        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._is_stopping or self._fenced or has_room())
            if self._fenced is not None:
                raise self._fenced
            if not has_room():
                raise UnavailableError(f"the query ends while output for {self._name} is unpublished; it is kept")

    def drain(self, timeout_s: float | None = None) -> bool:
        """
        Wait until everything is published; return whether it is, which may be false only with a timeout.

        Raises:
            UnavailableError: It took longer than the patience, or Spark was stopped, or this was closed, which the
                query's end does after that; says why. The next start publishes what is left.
            FencedError: Another driver took the job over, and publishes what is left.
        """
        with self._changed:
            patience_s = self._limits.patience_s
            is_patient = timeout_s is None or timeout_s > patience_s
            wait_s = patience_s if is_patient else timeout_s
            self._changed.wait_for(lambda: not self._waiting or self._fenced or self._is_closed, wait_s)
            if not self._waiting:
                return True
            if self._fenced is not None:
                raise self._fenced
            if not is_patient and not self._is_closed:
                return False
            left = f"the output of {len(self._waiting)} checkpoint(s) is not published to {self._name}"
            if not self._has_spark:
                raise UnavailableError(f"{left}: Spark was stopped before. The log keeps it; start the query again")
            raise UnavailableError(
                f"{left} after {patience_s:g} s: {self._error or 'it takes long'}. It is kept in the log; fix the "
                "cause and start the query again"
            )

    def stop_waiting(self) -> None:
        """Let no batch wait any more: the query is being stopped."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop after the current try, which is given up if it lasts."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or bool(self._waiting))
                if self._is_closed:
                    return
            if not self._publish_with_patience():
                return
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()

    def _oldest(self) -> Target:
        """
        Return the next target. While it waited, its checkpoint may have been subsumed; the newest one is not.

        That one's log lacks what was published when it was logged, which is more than was so at the target's.
        """
        with self._changed:
            return replace(self._waiting[0][0], newest=self._waiting[-1][0].checkpoint, published=self.published)

    def _goes_on(self) -> bool:
        return not self._is_closed

    def _publish_with_patience(self) -> bool:
        """Publish the next target, however often it must be tried; return whether it is, and this is not closed."""
        pause_s, reported, reported_s = _FIRST_PAUSE_S, "", float("-inf")
        while self._goes_on():
            target = self._oldest()
            try:
                with self._watched(target):
                    self._publish(target)
            except Exception as error:  # noqa: BLE001 - whatever it is, nothing is lost by waiting
                if not self._goes_on() or self._has_no_spark(target):
                    return False
                self._error = _last_line(error)
                if any(sign in str(error) for sign in _OVERTAKEN) and self._is_overtaken():
                    return False
                if self._error != reported or time.monotonic() - reported_s >= _REPORTED_EVERY_S:
                    reported, reported_s = self._error, time.monotonic()
                    logger.warning(
                        "output of checkpoint %d could not be published to %s, retrying: %s",
                        target.checkpoint.id,
                        self._name,
                        self._error,
                    )
            else:
                if reported_s > float("-inf"):
                    logger.info("output of checkpoint %d is published to %s", target.checkpoint.id, self._name)
                self.published, self._error = target.checkpoint.id, ""
                return True
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
        return False

    def _has_no_spark(self, target: Target) -> bool:
        """Ask whether Spark has been stopped, so that no try helps; if so, stop for good."""
        with suppress(Exception):  # without an answer it is tried again
            if self._is_spark_stopped():
                logger.warning(
                    "output of checkpoint %d for %s is left to the next start: Spark was stopped before",
                    target.checkpoint.id,
                    self._name,
                )
                self._has_spark = False
                self.close()
                return True
        return False

    @contextmanager
    def _watched(self, target: Target) -> Iterator[None]:
        """Report a try that takes long, again and again, and give it up when this is closed."""
        done, began_s = threading.Event(), time.monotonic()

        def watch() -> None:
            told_s = began_s
            while not done.wait(min(_LOOK_EVERY_S, _REPORTED_EVERY_S)):
                if self._is_closed:
                    break
                if time.monotonic() - told_s >= _REPORTED_EVERY_S:
                    told_s = time.monotonic()
                    logger.warning(
                        "output of checkpoint %d has been under way to %s for %.0f s: the output is large, or the "
                        "sink does not answer",
                        target.checkpoint.id,
                        self._name,
                        told_s - began_s,
                    )
            while not done.wait(_GRACE_S):
                with suppress(Exception):  # a stopped Spark has ended its jobs
                    self._give_up()

        threading.Thread(target=watch, name="dstl-publisher-watch", daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def _is_overtaken(self) -> bool:
        """Ask whether the job is another driver's, as another publisher has opened a slot; if so, stop for good."""
        try:
            self._check_owned()
        except FencedError as error:
            logger.warning("output for %s is left to another driver: %s", self._name, error)
            with self._changed:
                self._fenced = error
                self._changed.notify_all()
            return True
        except DstlError as error:
            logger.warning("the owner of the job could not be looked up: %s", error)
        return False


def _last_line(error: Exception) -> str:
    """Return an error's text; of one from a task, whose text is a traceback, the line with the error itself."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    named = [line.strip() for line in lines if line.strip().startswith("storage.errors.")]
    if named:
        return named[-1].partition(": ")[2]
    # Of other errors, such as those of a user's sink, the first line that is not indented ends the last traceback.
    starts = [number for number, line in enumerate(lines) if line.strip() == _TRACEBACK]
    after = lines[starts[-1] + 1 :] if starts else lines
    return next((line for line in after if not line.startswith(" ")), type(error).__name__).strip()
