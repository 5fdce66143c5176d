"""
Decides when a table is materialized, and tracks the result. No I/O, no clock: the caller passes the time.

One `Schedule` per job, operator and key-group range. Its cycle: *due* -> *asked* (a task was told to make a snapshot)
-> *running* (a snapshot is being stored) -> completed or failed. The first of these makes it due (I13):

1. time: `interval_s` after the last one; the first at a random time within it, to spread the partitions;
2. the log since the last one is larger than `log_ratio` times the table, and than `log_floor_bytes`;
3. applying the log would take longer than `replay_s_max`.

A failure is retried sooner than after an interval. A time trigger while another one runs, or with nothing new in the
log, counts as skipped, never as completed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from storage.errors import InvalidInputError

_ASKED_MS_MAX = 30_000
"""A task hands its snapshot over at once; one that has not by then never will."""
_GAPS_MAX = 4
"""A table is stale when it was not restored for this many times the gap between its last batches."""
_RETRIES_PER_INTERVAL = 10
_LEAST = {
    "interval_s": 1,
    "log_ratio": 0,
    "log_floor_bytes": 0,
    "replay_s_max": 1,
    "replay_bytes_per_s": 1,
    "bandwidth_bytes_per_s": 0,
    "threads": 1,
    "upload_attempts_max": 1,
    "failures_reported": 1,
}


@dataclass(frozen=True, slots=True)
class MaterializationSettings:
    """When tables are materialized, and how fast snapshots are stored."""

    enabled: bool = True
    """If off, state is restored from the log alone; an operator's log larger than `compaction.base_bytes_max` then
    grows for ever."""
    interval_s: int = 600
    """A table with changes is materialized this long after the last time; the first time at random within it."""
    log_ratio: float = 1.0
    """Materialize sooner when the log is this many times as large as the table was."""
    log_floor_bytes: int = 64 * 1024 * 1024
    """A log below this size does not count as large, however small the table is."""
    replay_s_max: int = 60
    """Materialize sooner when applying the log to a table would take longer."""
    replay_bytes_per_s: int = 20 * 1024 * 1024
    """Assumed speed of applying a log until a restore here has been measured."""
    bandwidth_bytes_per_s: int = 0
    """Limit for the upload of snapshots of this host; 0 for none."""
    threads: int = 2
    """Files of one job's snapshots that are read and uploaded in parallel; at most twice as many for all jobs
    together."""
    upload_attempts_max: int = 5
    """Attempts to upload one file."""
    failures_reported: int = 3
    """Consecutive failures of one table after which an error is logged."""
    root: Path | None = None
    """Accept snapshots only from below this folder; if unset, from any folder of this process's own user."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise InvalidInputError(f"materialization {name} must be at least {least}, got {getattr(self, name)}")


class Trigger(enum.StrEnum):
    """Why a table is materialized."""

    TIME = "time"
    LOG_SIZE = "log_size"
    REPLAY_TIME = "replay_time"


class Schedule:
    """
    Decides for one table. Not thread-safe.

    Args:
        settings: The limits.
        now_ms: When the table was first seen; monotonic, as all times here.
        chance: Position of the first time trigger in the first interval, within 0..1.
    """

    def __init__(self, settings: MaterializationSettings, now_ms: int, chance: float) -> None:
        self._settings = settings
        self._first_seen_ms = self._last_seen_ms = now_ms
        self._gap_ms = 0
        self._due_ms = now_ms + int(settings.interval_s * 1000 * chance)
        self._asked_ms: int | None = None
        self._running_ms: int | None = None
        self._succeeded_ms: int | None = None
        self._logged_up_to = -1
        self._running_up_to = self._stored_up_to = -1
        self._log_bytes_before = 0
        self._log_bytes_after = 0
        self._log_bytes_stored = 0
        self.table_bytes = 0
        self.failures = 0
        self.skipped = 0

    @property
    def log_bytes(self) -> int:
        """Size of the log since the last completed materialization."""
        return self._log_bytes_before + self._log_bytes_after

    @property
    def is_running(self) -> bool:
        """Whether a snapshot of this table is being stored."""
        return self._running_ms is not None

    def is_unanswered(self, now_ms: int) -> bool:
        """Return whether a task was asked for a snapshot and did not hand one over in time, a failure."""
        return self._asked_ms is not None and now_ms - self._asked_ms >= _ASKED_MS_MAX

    def is_stale(self, now_ms: int) -> bool:
        """
        Return whether this table was not restored for long: its tasks run elsewhere, or not at all.

        The limit is a whole interval, or four times the gap between the last batches if that is longer.
        """
        patience_ms = max(self._settings.interval_s * 1000, _GAPS_MAX * self._gap_ms)
        return not self.is_running and now_ms - self._last_seen_ms > patience_ms

    def running_s(self, now_ms: int) -> float:
        """Return for how many seconds the current one has run; 0 if none runs."""
        return 0.0 if self._running_ms is None else (now_ms - self._running_ms) / 1000

    def since_success_s(self, now_ms: int) -> float:
        """Return the seconds since the last success, or since the table was first seen: they grow if one is stuck."""
        return (now_ms - (self._first_seen_ms if self._succeeded_ms is None else self._succeeded_ms)) / 1000

    def logged(self, checkpoint_id: int, size_bytes: int) -> None:
        """Count what a checkpoint added to the log; ids already counted are ignored."""
        if checkpoint_id <= self._logged_up_to:
            return
        self._logged_up_to = checkpoint_id
        if checkpoint_id <= self._stored_up_to:
            self._log_bytes_stored += size_bytes
        elif self._running_ms is not None and checkpoint_id > self._running_up_to:
            self._log_bytes_after += size_bytes
        else:
            self._log_bytes_before += size_bytes

    def ask(self, now_ms: int, replay_bytes_per_s: float) -> Trigger | None:
        """Return why the table is due now, and mark it as asked; None if it is not due."""
        # A repeated batch asks twice in short succession; the effect of a pause of the query fades.
        self._gap_ms = max(now_ms - self._last_seen_ms, self._gap_ms // 2)
        self._last_seen_ms = now_ms
        if not self._settings.enabled or self._asked_ms is not None:
            return None
        if self.is_running:
            while self._due_ms <= now_ms:
                self._skip()
            return None
        trigger = self._trigger(now_ms, replay_bytes_per_s)
        if trigger is not None:
            self._asked_ms = now_ms
        return trigger

    def begin(self, now_ms: int, checkpoint_id: int) -> None:
        """Record that a snapshot of the table at this checkpoint is being stored from now on."""
        self._asked_ms = None
        self._running_ms, self._running_up_to = now_ms, checkpoint_id

    def completed(self, now_ms: int, table_bytes: int) -> None:
        """Record that the running one is stored; its log is truncated only when a checkpoint names it."""
        self._log_bytes_stored += self._log_bytes_before
        self._log_bytes_before, self._log_bytes_after = self._log_bytes_after, 0
        self._running_ms, self._succeeded_ms, self._stored_up_to = None, now_ms, self._running_up_to
        self._due_ms = now_ms + self._settings.interval_s * 1000
        self.table_bytes = table_bytes
        self.failures = 0

    def failed(self, now_ms: int) -> bool:
        """Record that the asked or running one failed; return whether to report that."""
        self._log_bytes_before, self._log_bytes_after = self.log_bytes, 0
        self._running_ms = self._asked_ms = None
        self.failures += 1
        retry_ms = self._settings.interval_s * 1000 // _RETRIES_PER_INTERVAL
        self._due_ms = now_ms + min(retry_ms << min(self.failures - 1, 10), retry_ms * _RETRIES_PER_INTERVAL // 2)
        return self.failures % self._settings.failures_reported == 0

    def named(self) -> None:
        """Record that the state has the stored one, or a replacement."""
        self._log_bytes_stored = 0

    def untaken(self, now_ms: int) -> bool:
        """
        Record that no checkpoint took the stored one, so its log counts again; return whether to report that.

        One that was asked for or runs meanwhile continues: it is already the next try.
        """
        self._log_bytes_before += self._log_bytes_stored
        self._log_bytes_stored, self._stored_up_to = 0, -1
        return self._asked_ms is None and not self.is_running and self.failed(now_ms)

    def _trigger(self, now_ms: int, replay_bytes_per_s: float) -> Trigger | None:
        settings = self._settings
        if self._due_ms <= now_ms:
            if self.log_bytes:
                return Trigger.TIME
            self._skip()
        if self.failures:
            return None  # a large log must not cause a failure at every checkpoint
        if self.log_bytes > max(settings.log_floor_bytes, settings.log_ratio * self.table_bytes):
            return Trigger.LOG_SIZE
        if self.log_bytes > settings.replay_s_max * replay_bytes_per_s:
            return Trigger.REPLAY_TIME
        return None

    def _skip(self) -> None:
        self._due_ms += self._settings.interval_s * 1000
        self.skipped += 1
