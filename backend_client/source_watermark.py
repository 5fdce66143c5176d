"""
The watermark after a query's input, which may contain Spark's own stateful operators. No I/O.

Spark passes a batch's watermark from the sources up through the plan. A stateful operator that holds rows back (a join
by time) emits a lower one than it gets, other nodes pass it on, and the minimum of several inputs counts.
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
        children: The nodes that it reads.
        gives: Whether this node defines the query's watermark.
        lets_out: For a stateful operator: maps the input's watermark to the output's, None for none.
        asks: For a stateful operator: whether it asks for a batch without data, given its input's next watermark.
    """

    children: Sequence[PlanNode] = ()
    gives: bool = False
    lets_out: Callable[[int], int | None] | None = None
    asks: Callable[[int], bool] | None = None

    @property
    def is_stateful(self) -> bool:
        """Whether this node or one below is a stateful operator."""
        return self.lets_out is not None or any(child.is_stateful for child in self.children)

    def output_ms(self, watermark_ms: int) -> int | None:
        """Return the watermark of the node's output, given the query's; None if it has none."""
        if self.gives:
            return watermark_ms
        if self.lets_out is not None:
            return self.lets_out(self.input_ms(watermark_ms) or 0)
        return self.input_ms(watermark_ms)

    def input_ms(self, watermark_ms: int) -> int | None:
        """Return the minimum of the inputs' watermarks; None without any."""
        outputs = (child.output_ms(watermark_ms) for child in self.children)
        return min((output for output in outputs if output is not None), default=None)

    def asks_at(self, watermark_ms: int) -> bool:
        """Return whether this node or one below asks for a batch without data at the query's next watermark."""
        own = self.asks is not None and self.asks(self.input_ms(watermark_ms) or 0)
        return own or any(child.asks_at(watermark_ms) for child in self.children)


def output_watermark_ms(tree: PlanNode, watermark_ms: int) -> int:
    """Return the watermark after the query's input; 0 if there is none yet."""
    return max(0, tree.output_ms(watermark_ms) or 0)


def output_time(tree: PlanNode, time: BatchTime) -> BatchTime:
    """Return a batch's time after the query's input; a watermark that does not exist yet is 0."""
    now, before = (output_watermark_ms(tree, moment) for moment in (time.watermark_ms, time.previous_watermark_ms))
    return replace(time, watermark_ms=now, previous_watermark_ms=before)
