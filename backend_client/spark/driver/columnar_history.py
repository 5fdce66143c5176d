"""Facts that a batch of a columnar operator passes to the next one. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from backend_client.failover.patience import TaskFailover
from backend_client.spark.batch import BatchContext, Receipt
from backend_client.spark.columnar_plan import ColumnarPlan
from backend_client.spark.combining import Combining, are_worth_combining, combining_of
from backend_client.spark.query import Operator


class ColumnarHistory:
    """
    Remembers whose rows are worth combining, and which ended state is gone; a query's first batch knows neither.

    Args:
        operators: The query's operators.
    """

    def __init__(self, operators: Sequence[Operator]) -> None:
        self._plans = {each.name: each.processor for each in operators if isinstance(each.processor, ColumnarPlan)}
        found = {name: combining_of(plan) for name, plan in self._plans.items()}
        self._possible = {name: combining for name, combining in found.items() if combining is not None}
        self._combined: dict[str, float] = {}
        """The operators whose rows are combined, with the number of rows per group in the last batch."""
        self._removed_ms: dict[str, tuple[int, int | None]] = {}
        """The last batch, and the watermark up to which its tasks have removed ended state."""

    def combining(self, operator: str, failover: TaskFailover) -> Combining | None:
        """Return how an operator's rows are combined in this batch; None for not at all."""
        # Rows that wait for their table are logged as they came, and run later beside others.
        return self._possible.get(operator) if operator in self._combined and _is_exact(failover) else None

    def rows_per_group(self, operator: str) -> float:
        """Return how many rows an operator whose rows are combined had for each that was left, in the last batch."""
        return self._combined[operator]

    def removed_ms(self, operator: str, context: BatchContext, failover: TaskFailover) -> int | None:
        """Return up to which watermark the batch's base has no state that emits nothing; None if that is unknown."""
        last_id, removed_ms = self._removed_ms.get(operator, (-1, None))
        is_base = context.base is not None and context.base.id == last_id
        return removed_ms if is_base and _is_exact(failover) else None

    def took(self, operator: str, context: BatchContext, receipts: Sequence[Receipt]) -> None:
        """Take the accepted receipts of an operator's first pass over a batch."""
        plan = self._plans.get(operator)
        if plan is None:
            return
        rows, groups = sum(receipt.rows for receipt in receipts), sum(receipt.groups for receipt in receipts)
        if operator in self._possible and are_worth_combining(rows, groups, are_combined=operator in self._combined):
            self._combined[operator] = rows / max(groups, 1)
        else:
            self._combined.pop(operator, None)
        all_ran = not any(receipt.is_stalled for receipt in receipts)
        removed_ms = plan.moments(context.time)[0].watermark_ms if all_ran else None
        self._removed_ms[operator] = context.checkpoint_id, removed_ms


def _is_exact(failover: TaskFailover) -> bool:
    """Return whether all rows of the batch, and none of earlier ones, run in it."""
    return not failover.waiting and not any(patience.sets_aside for patience in failover.patience.values())
