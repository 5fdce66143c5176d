"""
The receipts of a batch's tasks: taken with the output that they belong to, and summed up.

An operator's output is computed once and kept for all who read it. A block that was lost is an error, and every read
checks the marker rows: output of another attempt than the one whose receipt was taken (a speculative copy's) is
refused. The whole batch is executed again then (I18).
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame

from backend_client.progress import BatchProgress
from backend_client.spark.task.task import MARKER_COLUMN, BatchContext, Receipt
from dstl_service.wire import CompleteResponse, OperatorInfo
from storage.errors import InternalError

STALE_OUTPUT = "DSTL_STALE_OUTPUT"


def collect_receipts(output: DataFrame, info: OperatorInfo) -> list[Receipt]:
    """Compute an operator's output, keep it, and return one receipt per partition."""
    rows = output.where(f"{MARKER_COLUMN} is not null").select(MARKER_COLUMN).collect()
    texts = [text for row in rows if (text := row[0].partition(" ")[2])]
    receipts = sorted(map(Receipt.from_json, texts), key=lambda receipt: receipt.partition)
    if [receipt.partition for receipt in receipts] != list(range(info.parallelism)):
        raise InternalError(
            f"operator {info.name!r} ran with partitions {[receipt.partition for receipt in receipts]} instead of "
            f"0..{info.parallelism - 1}"
        )
    return receipts


def checked(output: DataFrame, receipts: Sequence[Receipt]) -> DataFrame:
    """
    Return the output's rows without the marker rows, failing where a marker is not of an accepted attempt.

    The condition asks for the partition's id to be non-deterministic in Spark's eyes: it must neither be merged with a
    user's filter nor moved behind it, or a marker could be dropped before it is checked. The attempts are one array,
    for single numbers would be part of the code that Spark generates and compiles: each batch anew.
    """
    attempts = ", ".join(f"'{receipt.attempt}'" for receipt in receipts)
    attempt = f"substring_index({MARKER_COLUMN}, ' ', 1)"
    condition = (
        f"case when {MARKER_COLUMN} is null then true "
        f"when array_contains(array({attempts}), {attempt}) and spark_partition_id() >= 0 then false "
        f"else raise_error(concat('{STALE_OUTPUT} of attempt ', {attempt})) end"
    )
    return output.where(condition).drop(MARKER_COLUMN)


def progress_of(
    context: BatchContext,
    receipts: Sequence[Receipt],
    response: CompleteResponse,
    marks: tuple[float, float, float, float],
    tries: int,
) -> BatchProgress:
    """Return a batch's figures; `marks` are its start, when it was computed, when the function returned, its end."""
    started, computed, called, done = marks
    return BatchProgress(
        job=context.settings.job,
        batch_id=context.checkpoint_id,
        rows=sum(receipt.rows for receipt in receipts),
        keys=sum(receipt.keys for receipt in receipts),
        changes=sum(receipt.changes for receipt in receipts),
        state_ms=(computed - started) * 1000,
        function_ms=(called - computed) * 1000,
        checkpoint_ms=(done - called) * 1000,
        bytes_written=response.bytes_written,
        objects_written=response.objects_written,
        tries=tries,
        state_reads=sum(receipt.state_reads for receipt in receipts),
        log_bytes=sum(ref.size_bytes for receipt in receipts for ref in receipt.refs),
        table_bytes=sum(receipt.table_bytes for receipt in receipts),
        upload_ms=response.persist_ms,
        manifest_ms=response.manifest_ms,
        late_rows=sum(receipt.late_rows for receipt in receipts),
        watermark_ms=None if context.time is None else context.time.watermark_ms,
    )
