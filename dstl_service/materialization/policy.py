"""
When a table is to be materialized, and what became of it. No I/O, no clock: the caller says what time it is.

One `Schedule` per job, operator and key-group range. Its life: *due* -> *asked* (a task was told to make a snapshot) ->
*running* (a snapshot is being stored) -> completed or failed, and again. Whichever comes first makes it due (I13):

1. time: `interval_s` after the last one; the first at a random time within it, so that partitions do not come together;
2. the log since the last one is larger than `log_ratio` times the table, and than `log_floor_bytes`;
3. applying the log would take longer than `replay_s_max`.

What failed is repeated sooner than after an interval. What comes due while another one runs, or finds nothing new in
the log, counts as skipped, never as completed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from storage.errors import InvalidInputError

_ASKED_MS_MAX = 30_000
"""A task hands its snapshot over at once; one that has not by then is not going to."""
_GAPS_MAX = 4
"""A table is missed when nobody has asked for it for so many times what lay between the last batches."""
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
    """Without materialization, state is restored from the log alone; an operator's log of more than
    `compaction.base_bytes_max` then grows for ever."""
    interval_s: int = 600
    """A table with changes is materialized this long after the last time; the first time at random within it."""
    log_ratio: float = 1.0
    """Materialize sooner when the log is this many times as large as the table was."""
    log_floor_bytes: int = 64 * 1024 * 1024
    """A log below this size does not count as large, however small the table is."""
    replay_s_max: int = 60
    """Materialize sooner when applying the log to a table would take longer."""
    replay_bytes_per_s: int = 20 * 1024 * 1024
    """How fast a log is taken to be applied until a restore here has been measured."""
    bandwidth_bytes_per_s: int = 0
    """Limit for the upload of snapshots of this host; 0 none."""
    threads: int = 2
    """Files of one job's snapshots that are read and uploaded at the same time; those of all jobs are at most twice as
    many."""
    upload_attempts_max: int = 5
    """How often the upload of one file is tried."""
    failures_reported: int = 3
    """So many failures of one table in a row are reported as an error."""
    root: Path | None = None
    """Take snapshots only from below this folder; else from any folder of this process's own user."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise InvalidInputError(f"materialization {name} must be at least {least}, it is {getattr(self, name)}")


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
        chance: Within 0..1: where in the first interval the first time trigger lies.
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
        """Log since the last completed materialization."""
        return self._log_bytes_before + self._log_bytes_after

    @property
    def is_running(self) -> bool:
        """Tell whether a snapshot of this table is being stored."""
        return self._running_ms is not None

    def is_unanswered(self, now_ms: int) -> bool:
        """Tell whether a task was asked for a snapshot and did not hand one over in time; that is a failure."""
        return self._asked_ms is not None and now_ms - self._asked_ms >= _ASKED_MS_MAX

    def is_stale(self, now_ms: int) -> bool:
        """
        Tell whether nobody asked for this table for long: its tasks run elsewhere, or not at all.

        A whole interval is long, or where batches come more rarely, four times what lay between the last ones.
        """
        patience_ms = max(self._settings.interval_s * 1000, _GAPS_MAX * self._gap_ms)
        return not self.is_running and now_ms - self._last_seen_ms > patience_ms

    def running_s(self, now_ms: int) -> float:
        """Return how long the running one runs; 0 if there is none."""
        return 0.0 if self._running_ms is None else (now_ms - self._running_ms) / 1000

    def since_success_s(self, now_ms: int) -> float:
        """Return the time since the last success, or since the table was first seen: it grows when one is stuck."""
        return (now_ms - (self._first_seen_ms if self._succeeded_ms is None else self._succeeded_ms)) / 1000

    def logged(self, checkpoint_id: int, size_bytes: int) -> None:
        """Count what a checkpoint added to the log; what was counted before is left out."""
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
        """Return why the table is to be materialized now, and count it as asked for; None: not now."""
        # A batch that is executed again asks twice at short distance; a pause of the query is forgotten by and by.
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
        """Note that a snapshot of the table at this checkpoint is being stored from now on."""
        self._asked_ms = None
        self._running_ms, self._running_up_to = now_ms, checkpoint_id

    def completed(self, now_ms: int, table_bytes: int) -> None:
        """Note that the running one is stored; its log is not cut off before a checkpoint names it."""
        self._log_bytes_stored += self._log_bytes_before
        self._log_bytes_before, self._log_bytes_after = self._log_bytes_after, 0
        self._running_ms, self._succeeded_ms, self._stored_up_to = None, now_ms, self._running_up_to
        self._due_ms = now_ms + self._settings.interval_s * 1000
        self.table_bytes = table_bytes
        self.failures = 0

    def failed(self, now_ms: int) -> bool:
        """Note that what was asked for or runs has failed; return whether that is to be reported."""
        self._log_bytes_before, self._log_bytes_after = self.log_bytes, 0
        self._running_ms = self._asked_ms = None
        self.failures += 1
        retry_ms = self._settings.interval_s * 1000 // _RETRIES_PER_INTERVAL
        self._due_ms = now_ms + min(retry_ms << min(self.failures - 1, 10), retry_ms * _RETRIES_PER_INTERVAL // 2)
        return self.failures % self._settings.failures_reported == 0

    def named(self) -> None:
        """Note that the state has what was stored, or what replaces it."""
        self._log_bytes_stored = 0

    def untaken(self, now_ms: int) -> bool:
        """
        Note that no checkpoint took what was stored, so that its log counts again; return whether to report that.

        Another one that was asked for or runs meanwhile goes on: it is the next try already.
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
            return None  # a large log must not turn one failure into one at every checkpoint
        if self.log_bytes > max(settings.log_floor_bytes, settings.log_ratio * self.table_bytes):
            return Trigger.LOG_SIZE
        if self.log_bytes > settings.replay_s_max * replay_bytes_per_s:
            return Trigger.REPLAY_TIME
        return None

    def _skip(self) -> None:
        self._due_ms += self._settings.interval_s * 1000
        self.skipped += 1
