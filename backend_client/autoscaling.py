"""
Decides when a query's operators get more or fewer partitions. No I/O.

Batches are *busy* if they take longer than the rule says, or if the sources hold several batches' rows back; they are
*calm* if half the partitions would do. A few busy batches in a row double the partitions, many calm ones halve them.
Two facts keep the number from swinging: a calm batch takes at most a third of the rule's time, so that it is not busy
with half the partitions; and each rise after a fall makes the next fall wait for twice as many calm batches.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backend_client.settings import BackendSettings

logger = logging.getLogger("backend_client")

COLD_BATCHES = 5
"""The first batches of a start compile, import and restore, and say nothing about the partitions."""
BUSY_BATCHES = 3
CALM_BATCHES, CALM_BATCHES_MAX = 30, 1000
CALM_SHARE = 1 / 3
"""Largest share of the rule's time that a calm batch takes."""
BACKLOG_BATCHES = 3.0
"""Sources that hold back the rows of more batches than this make a batch busy; of more than one, not calm."""
GAIN_MIN = 0.9
"""Twice the partitions must bring batches below this share of their time; otherwise more partitions do not help."""


@dataclass(frozen=True, slots=True)
class AutoscaleRule:
    """
    The goal of the rule.

    Args:
        batch_ms: A batch's longest duration, in ms.
        least: Fewest partitions of an operator.
        most: Most partitions of an operator.
    """

    batch_ms: float
    least: int
    most: int

    @classmethod
    def of(cls, settings: BackendSettings, cores: int, max_parallelism: int) -> AutoscaleRule | None:
        """Return the rule that the settings ask for; None without one."""
        if settings.autoscale_batch_ms is None:
            return None
        most = min(max(settings.autoscale_max or cores, settings.autoscale_min), max_parallelism)
        return cls(settings.autoscale_batch_ms, min(settings.autoscale_min, most), most)

    def start(self, stored: int | None, given: int) -> int:
        """Return the partitions that an operator starts with: its last ones, those of the program for a new one."""
        return given if stored is None else min(max(stored, self.least), self.most)


@dataclass(slots=True)
class Autoscaling:
    """A rule, and its record of the last batches."""

    rule: AutoscaleRule
    _cold: int = COLD_BATCHES
    _busy_ms: list[float] = field(default_factory=list)
    _calm: int = 0
    _calm_wanted: int = CALM_BATCHES
    _has_fallen: bool = False
    _before_ms: float | None = None
    """Median of the busy batches before the last rise."""
    _useless_ms: float | None = None
    """Median of the busy batches at which a rise did not help."""

    def after_batch(
        self, batch_ms: float, backlog: float, current: Mapping[str, int], *, is_changing: bool
    ) -> dict[str, int]:
        """
        Return the operators that are to have another number of partitions, with the number.

        Args:
            batch_ms: How long the batch took.
            backlog: How many batches like this one the sources hold back.
            current: The partitions of each operator.
            is_changing: Whether they changed with this batch, or are about to, or it recovers from a loss: it says
                nothing about the present ones.
        """
        if is_changing or self._cold:
            self._cold = max(0, self._cold - 1)
            self._busy_ms.clear()
            self._calm = 0
            return {}
        if batch_ms > self.rule.batch_ms or backlog > BACKLOG_BATCHES:
            self._busy_ms.append(batch_ms)
            self._calm = 0
            return self._more(current) if len(self._busy_ms) >= BUSY_BATCHES else {}
        self._busy_ms.clear()
        self._calm = self._calm + 1 if batch_ms <= CALM_SHARE * self.rule.batch_ms and backlog <= 1 else 0
        return self._fewer(current) if self._calm >= self._calm_wanted else {}

    def _more(self, current: Mapping[str, int]) -> dict[str, int]:
        median_ms = statistics.median(self._busy_ms)
        self._busy_ms.clear()
        if self._before_ms is not None and median_ms > GAIN_MIN * self._before_ms:
            logger.warning(
                "batches take %.0f ms with twice the partitions and took %.0f ms before: more partitions do not help",
                median_ms,
                self._before_ms,
            )
            self._useless_ms = median_ms
        self._before_ms = None
        if self._useless_ms is not None and median_ms * GAIN_MIN <= self._useless_ms:
            return {}
        most = self.rule.most
        wanted = {name: min(2 * number, most) for name, number in current.items() if number < most}
        if wanted:
            self._before_ms, self._useless_ms = median_ms, None
            if self._has_fallen:
                self._calm_wanted = min(2 * self._calm_wanted, CALM_BATCHES_MAX)
        self._has_fallen = False
        return wanted

    def _fewer(self, current: Mapping[str, int]) -> dict[str, int]:
        self._calm, self._before_ms, self._useless_ms = 0, None, None
        least = self.rule.least
        wanted = {name: max(-(-number // 2), least) for name, number in current.items() if number > least}
        self._has_fallen = self._has_fallen or bool(wanted)
        return wanted


def backlog_of(sources: list[Mapping[str, Any]]) -> float:
    """
    Return how many batches like the last one the sources hold back, by Spark's progress; the largest of all sources.

    Args:
        sources: Spark's ``sources`` of a progress. Only numbers of rows by partition, as Kafka's, say how many there
            are; other offsets count as none.
    """
    return max(map(_backlog_of, sources), default=0.0)


def _backlog_of(source: Mapping[str, Any]) -> float:
    ends = [_total(source.get(name)) for name in ("latestOffset", "endOffset")]
    if ends[0] is None or ends[1] is None:
        return 0.0
    return max(0, ends[0] - ends[1]) / max(1, source.get("numInputRows") or 0)


def _total(offset: Any) -> int | None:
    if isinstance(offset, str):
        try:
            offset = json.loads(offset)
        except ValueError:
            return None
    if not isinstance(offset, dict) or not all(isinstance(part, dict) for part in offset.values()):
        return None
    numbers = [number for part in offset.values() for number in part.values()]
    return sum(numbers) if numbers and all(isinstance(number, int) for number in numbers) else None
