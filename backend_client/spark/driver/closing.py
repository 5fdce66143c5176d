"""
The second pass over a batch, in which what its rows have made due is done. No I/O.

When the watermark moves, Spark runs a batch without data for its own stateful operators, in which timers fire and
windows end. Its plan has none of this backend's operators, so it runs none for them. What it would do there is done
here at the end of the batch that moves the watermark: each operator runs once more, without rows from the stream, at
the watermark that Spark gives to the next batch. Its changes join those of the first pass in one checkpoint, and its
output follows theirs. It is left out where nothing is due by then, which the receipts of the first pass tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from backend_client.batch_time import BatchTime
from backend_client.spark.task.task import Receipt
from dstl_service.wire import ChangeSetRef


@dataclass(frozen=True, slots=True)
class SecondPass:
    """
    What is to be done in it.

    Args:
        time: Of the pass. What is late in it is so by the watermark of the batch, as behind a batch of its own.
        due: The operators in which something is due.
        earlier: The change sets of the first pass, by operator and partition.
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
        time: Of the batch; None where time is no matter.
        next_watermark_ms: The watermark at which the batch is closed; None if it is left open.
        receipts: Of its first pass.
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
