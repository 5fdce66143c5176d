"""The figures of one batch: its work and its cost. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

_UNITS = ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB"))


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """
    Figures of one batch, over all its operators.

    `state_ms` is the time of the operators' jobs with the start of the upload, `function_ms` that of the user's
    function. `checkpoint_ms` is the time that the checkpoint adds after both, up to the existing manifest; within it,
    `upload_ms` is the coordinator's wait for the change sets, `manifest_ms` the writing of the manifest. `tries` is 1
    unless the batch was executed again. `state_reads` counts reads of tables by key; reads of the batch's own writes do
    not count. `table_bytes` is the size of all partitions' tables. `log_bytes` is the size of the change sets,
    `bytes_written` that of all objects. `late_rows` were dropped and are not included in `rows`. `watermark_ms` is the
    batch's watermark, None if no operator uses time. `unpublished` counts checkpoints before this one whose output its
    sink has not published yet. `rows_waiting` counts deferred rows that have not run yet, of this batch and earlier
    ones; `rows_lost` the batch's rows that do not run unless somebody asks for it.
    `standby_tables` counts complete copies of tables on other hosts, `standby_missing`
    those that are not complete, `standby_lag` the checkpoints that the oldest one lacks; `standby_bytes` is their size.
    """

    job: str
    batch_id: int
    rows: int
    keys: int
    changes: int
    state_ms: float
    function_ms: float
    checkpoint_ms: float
    bytes_written: int
    objects_written: int
    tries: int
    late_rows: int = 0
    watermark_ms: int | None = None
    state_reads: int = 0
    log_bytes: int = 0
    table_bytes: int = 0
    upload_ms: float = 0.0
    manifest_ms: float = 0.0
    unpublished: int = 0
    rows_waiting: int = 0
    rows_lost: int = 0
    standby_tables: int = 0
    standby_missing: int = 0
    standby_lag: int = 0
    standby_bytes: int = 0

    @property
    def total_ms(self) -> float:
        """The whole batch, without Spark's own work before and after it."""
        return self.state_ms + self.function_ms + self.checkpoint_ms

    def to_text(self) -> str:
        """Return the figures as one readable line."""
        late = f" ({self.late_rows:,} late)" if self.late_rows else ""
        waiting = f", {self.unpublished} unpublished" if self.unpublished else ""
        if self.rows_waiting:
            waiting += f", {self.rows_waiting:,} rows deferred"
        if self.rows_lost:
            waiting += f", {self.rows_lost:,} rows lost"
        again = f", executed {self.tries} times" if self.tries > 1 else ""
        copies = f", {self.standby_tables} copies" if self.standby_tables or self.standby_missing else ""
        copies += f", {self.standby_lag} behind" if self.standby_lag else ""
        copies += f", {self.standby_missing} missing" if self.standby_missing else ""
        return (
            f"{self.job} batch {self.batch_id}: {self.rows:,} rows{late}, {self.keys:,} keys, "
            f"{self.state_reads:,} reads, {self.changes:,} writes, "
            f"log {_size(self.log_bytes)}, tables {_size(self.table_bytes)}; "
            f"{self.total_ms:,.0f} ms (state {self.state_ms:,.0f}, function {self.function_ms:,.0f}, "
            f"checkpoint {self.checkpoint_ms:,.0f}){again}{waiting}{copies}"
        )


def _size(size_bytes: int) -> str:
    for unit, name in _UNITS:
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} B"
