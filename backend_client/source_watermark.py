"""
The watermark behind a query's input, where stateful operators of Spark's own stand in it. No I/O.

Spark hands the watermark of a batch from its source up through the plan: a stateful operator lets another one out than
came in where it keeps rows back (a join by time), others let it through, and of several inputs the least counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from backend_client.batch_time import BatchTime


@dataclass(frozen=True, slots=True)
class PlanNode:
    """
    A node of Spark's plan.

    Args:
        children: What it reads.
        gives: Whether the query's watermark is defined here.
        lets_out: Of a stateful operator: the watermark of its output, by that of its input; None for none.
        asks: Of a stateful operator: whether it asks for a batch without data, by the next watermark of its input.
    """

    children: Sequence[PlanNode] = ()
    gives: bool = False
    lets_out: Callable[[int], int | None] | None = None
    asks: Callable[[int], bool] | None = None

    @property
    def is_stateful(self) -> bool:
        """Whether there is a stateful operator here or below."""
        return self.lets_out is not None or any(child.is_stateful for child in self.children)

    def output_ms(self, watermark_ms: int) -> int | None:
        """Return the watermark of the node's output, by that of the query; None if it has none."""
        if self.gives:
            return watermark_ms
        if self.lets_out is not None:
            return self.lets_out(self.input_ms(watermark_ms) or 0)
        return self.input_ms(watermark_ms)

    def input_ms(self, watermark_ms: int) -> int | None:
        """Return the least watermark that its inputs have."""
        outputs = (child.output_ms(watermark_ms) for child in self.children)
        return min((output for output in outputs if output is not None), default=None)

    def asks_at(self, watermark_ms: int) -> bool:
        """Return whether an operator here or below asks for a batch without data at the query's next watermark."""
        own = self.asks is not None and self.asks(self.input_ms(watermark_ms) or 0)
        return own or any(child.asks_at(watermark_ms) for child in self.children)


def output_watermark_ms(tree: PlanNode, watermark_ms: int) -> int:
    """Return the watermark behind the query's input; 0 for none yet."""
    return max(0, tree.output_ms(watermark_ms) or 0)


def output_time(tree: PlanNode, time: BatchTime) -> BatchTime:
    """Return a batch's time behind the query's input; a watermark that is not there yet is 0."""
    now, before = (output_watermark_ms(tree, moment) for moment in (time.watermark_ms, time.previous_watermark_ms))
    return replace(time, watermark_ms=now, previous_watermark_ms=before)
