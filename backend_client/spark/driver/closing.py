"""
The second pass over a batch: fires the timers and ends the windows that its rows have made due. No I/O.

When the watermark moves, Spark runs a batch without data for its own stateful operators, in which timers fire and
windows end. Its plan contains none of this backend's operators, so it runs none for them. Their work is done here, at
the end of the batch that moves the watermark: operators run once more, without rows from the stream, at the watermark
that Spark gives to the next batch. The changes join those of the first pass in one checkpoint, and the output follows
that of the first pass. Without anything due, which the first pass's receipts tell, the second pass is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from backend_client.batch_time import BatchTime
from backend_client.spark.batch import Receipt
from dstl_service.wire import ChangeSetRef


@dataclass(frozen=True, slots=True)
class SecondPass:
    """
    The work of a second pass.

    Args:
        time: The time of the pass. Rows are late by the watermark of the first pass, as if that were the batch before.
        due: The operators in which something is due.
        earlier: The first pass's change sets, by operator and partition.
    """

    time: BatchTime
    due: frozenset[str]
    earlier: Mapping[str, Mapping[int, Sequence[ChangeSetRef]]]


def second_pass(
    time: BatchTime | None, next_watermark_ms: int | None, receipts: Sequence[Receipt]
) -> SecondPass | None:
    """
    Return what is due when a batch's watermark moves; None if nothing is.

    Args:
        time: The batch's time; None if no operator uses it.
        next_watermark_ms: The watermark at which the batch is closed; None if it is left open.
        receipts: The receipts of its first pass.
    """
    if time is None or next_watermark_ms is None:
        return None
    due = frozenset(
        receipt.operator
        for receipt in receipts
        if receipt.next_due_ms is not None and receipt.next_due_ms <= next_watermark_ms
    )
    if next_watermark_ms <= time.watermark_ms or not due:
        return None
    earlier: dict[str, dict[int, Sequence[ChangeSetRef]]] = {}
    for receipt in receipts:
        earlier.setdefault(receipt.operator, {})[receipt.partition] = receipt.refs
    moved = replace(time, watermark_ms=next_watermark_ms, previous_watermark_ms=time.watermark_ms)
    return SecondPass(moved, due, earlier)
