"""What one batch did and cost. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

_UNITS = ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB"))


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """
    Figures of one batch, over all its operators.

    `checkpoint_ms` is what the checkpoint adds to a batch: from the end of the last task to the existing manifest,
    without the time that the user's function takes meanwhile; of that, `upload_ms` is the coordinator's wait for the
    change sets, `manifest_ms` the writing of the manifest. `state_ms` is the time of the operators' jobs,
    `function_ms` that of the user's function. `tries` is 1 unless the batch had to be executed again. `state_reads` are
    reads of tables by key; what a batch wrote itself is read without. `table_bytes` are the tables' files, all
    partitions together. `log_bytes` are those of the change sets, `bytes_written` those of all objects. `late_rows`
    came behind the watermark and were dropped; they are not among `rows`. `watermark_ms` is the batch's watermark, None
    without operators that have a time mode.
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

    @property
    def total_ms(self) -> float:
        """The whole batch, but for what Spark does before and after it."""
        return self.state_ms + self.function_ms + self.checkpoint_ms

    def to_text(self) -> str:
        """Return the figures as one line for people."""
        late = f" ({self.late_rows:,} late)" if self.late_rows else ""
        again = f", executed {self.tries} times" if self.tries > 1 else ""
        return (
            f"{self.job} batch {self.batch_id}: {self.rows:,} rows{late}, {self.keys:,} keys, "
            f"{self.state_reads:,} reads, {self.changes:,} writes, "
            f"log {_size(self.log_bytes)}, tables {_size(self.table_bytes)}; "
            f"{self.total_ms:,.0f} ms (state {self.state_ms:,.0f}, function {self.function_ms:,.0f}, "
            f"checkpoint {self.checkpoint_ms:,.0f}){again}"
        )


def _size(size_bytes: int) -> str:
    for unit, name in _UNITS:
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} B"
