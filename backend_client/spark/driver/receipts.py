"""
The receipts of a batch's tasks: collected with the output that they belong to, and summed up.

An operator's output is computed once and kept for all its readers. A lost block is an error, and every read checks the
marker rows: output of another attempt than the one whose receipt was taken (a speculative copy's) is refused. The whole
batch is then executed again (I18).
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame

from backend_client.progress import BatchProgress
from backend_client.spark.batch import BatchContext, Receipt
from backend_client.spark.private.frame_maker import FrameMaker
from backend_client.spark.task.task import MARKER_COLUMN
from dstl_service.wire import CompleteResponse, OperatorInfo
from storage.errors import InternalError

STALE_OUTPUT = "DSTL_STALE_OUTPUT"


def collect_receipts(output: DataFrame, info: OperatorInfo) -> list[Receipt]:
    """Compute an operator's output, keep it, and return one receipt per partition."""
    markers = FrameMaker.of(output).texts(output)  # the last column has them
    texts = [text for marker in markers if (text := marker.partition(" ")[2])]
    receipts = sorted(map(Receipt.from_json, texts), key=lambda receipt: receipt.partition)
    if [receipt.partition for receipt in receipts] != list(range(info.parallelism)):
        raise InternalError(
            f"operator {info.label!r} returned receipts of partitions {[receipt.partition for receipt in receipts]} "
            f"instead of 0..{info.parallelism - 1}"
        )
    return receipts


def checked(output: DataFrame, receipts: Sequence[Receipt]) -> DataFrame:
    """
    Return the output's rows without the marker rows; reading fails at a marker of an attempt that was not accepted.

    The condition uses the partition id so that Spark treats it as non-deterministic. Spark must neither merge it with a
    user's filter nor move it after one, or a marker could be dropped before it is checked. The attempts are one text,
    because single values would become part of the code that Spark generates, and each batch would compile it again.
    """
    attempts = f",{','.join(str(receipt.attempt) for receipt in receipts)},"
    attempt = f"substring_index({MARKER_COLUMN}, ' ', 1)"
    steps = FrameMaker.of(output).steps(output)
    steps = steps.where_unlisted(
        f"{MARKER_COLUMN} is null and spark_partition_id() >= 0",
        f"concat(',', {attempt}, ',')",
        attempts,
        f"raise_error(concat('{STALE_OUTPUT} of attempt ', {attempt}))",
    )
    return steps.drop_last().frame()


def progress_of(
    context: BatchContext,
    receipts: Sequence[Receipt],
    response: CompleteResponse,
    marks: tuple[float, float, float, float],
    tries: int,
) -> BatchProgress:
    """Return a batch's figures; `marks`, in seconds: start, computed, function returned, checkpoint complete."""
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
