"""
Commits offsets in the background: the latest ones, as often as the system allows; no batch waits for it.

A failed commit is repeated, and reported once a minute; nothing depends on it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from backend_client.sources.kafka_positions import Positions

logger = logging.getLogger("backend_client")

Commit = Callable[[Positions, int], None]
"""Commits the offsets of a checkpoint, of which it gets the id."""


@dataclass(frozen=True, slots=True)
class CommitTimes:
    """
    When offsets are committed.

    Args:
        pause_s: Seconds between two commits.
        pause_max_s: The longest pause between two tries.
        repeated_s: Seconds after which offsets are committed again: brokers forget a group without commits in a week.
        reported_s: Seconds between two reports of a failure.
    """

    pause_s: float = 1.0
    pause_max_s: float = 15.0
    repeated_s: float = 12 * 3600.0
    reported_s: float = 60.0


class BackgroundCommits:
    """
    Commits one query's offsets to one system in a thread of its own; holds one checkpoint's offsets at most.

    Args:
        name: Where to, for messages.
        commit: Commits; only called by the thread, one call after the other.
        times: When.
    """

    def __init__(self, name: str, commit: Commit, times: CommitTimes = CommitTimes()) -> None:
        self._name = name
        self._commit = commit
        self._times = times
        self._changed = threading.Condition()
        self._latest: tuple[Positions, int] | None = None
        self._committed: tuple[Positions, int] | None = None
        self._is_closed = self._is_trying = False
        self._tries = self._hurried = 0
        self._reported_s = float("-inf")
        self._thread: threading.Thread | None = None

    def submit(self, positions: Positions, checkpoint_id: int) -> None:
        """Have a checkpoint's offsets committed, in place of earlier ones; returns at once."""
        if not positions:
            return
        with self._changed:
            self._latest = (positions, checkpoint_id)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="dstl-offsets", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """
        Wait until the latest offsets are committed, or a try that begins now has failed; return whether they are.

        Raises nothing.
        """
        with self._changed:
            enough = self._tries + (2 if self._is_trying else 1)
            if self._is_behind():
                self._hurried = enough
                self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_behind() or self._tries >= enough, timeout_s)
            return not self._is_behind()

    def close(self) -> None:
        """Stop after the current try."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _is_behind(self) -> bool:
        return self._committed is not self._latest

    def _work(self) -> None:
        pause_s = self._times.pause_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._is_behind(), self._times.repeated_s)
                if self._is_closed or self._latest is None:
                    return
                trying, self._is_trying = self._latest, True
            is_done = self._try(*trying)
            pause_s = self._times.pause_s if is_done else min(2 * pause_s, self._times.pause_max_s)
            with self._changed:
                self._committed = trying if is_done else None
                self._is_trying, self._tries = False, self._tries + 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_closed or self._tries < self._hurried, pause_s)

    def _try(self, positions: Positions, checkpoint_id: int) -> bool:
        try:
            self._commit(positions, checkpoint_id)
        except Exception as error:  # noqa: BLE001 - whatever it is, the query goes on
            if time.monotonic() - self._reported_s >= self._times.reported_s:
                self._reported_s = time.monotonic()
                logger.warning(
                    "the offsets of checkpoint %d could not be committed to %s, retrying: %s",
                    checkpoint_id,
                    self._name,
                    error,
                )
            return False
        if self._reported_s > float("-inf"):
            self._reported_s = float("-inf")
            logger.info("the offsets of checkpoint %d are committed to %s", checkpoint_id, self._name)
        return True
