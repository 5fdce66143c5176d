"""
Fraud rules with timers: several rules check each card's payments, and their findings form cases.

- **rate**: the fifth payment of a minute, and each one after it while there are five in the last minute.
- **travel**: two consecutive payments more than 100 km apart, too far for 900 km/h.
- **case**: a finding of any rule opens a case for the card, or extends the open one. After ten minutes without findings
  a timer closes it; it is emitted with the number of findings and the sum of their payments.

A card's payments arrive in the order of time. The tests compute the same with pandas, over all payments at once.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

from backend_client import ChangelogStateBackend
from examples.common import START_S, main, read_files, write_files

PAYMENTS = "card STRING, time TIMESTAMP, cents BIGINT, latitude DOUBLE, longitude DOUBLE"
EVENTS = "card STRING, time TIMESTAMP, event STRING, findings BIGINT, cents BIGINT"
RATE, RATE_MS = 5, 60_000
TRAVEL_KM, TRAVEL_KM_PER_H = 100, 900
CASE_MS = 600_000


class FraudRules(StatefulProcessor):
    """The state of a card: the times of the last minute, the last place, and the open case."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state."""
        self._handle = handle
        self._recent = handle.getValueState("recent", "times ARRAY<BIGINT>")
        self._place = handle.getValueState("place", "time BIGINT, latitude DOUBLE, longitude DOUBLE")
        self._case = handle.getValueState("case", "last BIGINT, findings BIGINT, cents BIGINT")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any = None) -> Iterator[Row]:  # noqa: N802, N803
        """Apply the rules to each payment; yield their findings."""
        recent = [] if (stored := self._recent.get()) is None else list(stored[0])
        place = self._place.get()
        for row in sorted(rows, key=lambda row: row.time):
            now = round(row.time.timestamp() * 1000)
            recent = [*(time for time in recent if time > now - RATE_MS), now]
            found = ["rate"] if len(recent) >= RATE else []
            if place is not None and _too_far(place, (now, row.latitude, row.longitude)):
                found.append("travel")
            place = (now, row.latitude, row.longitude)
            self._place.update(place)
            if found:
                yield from self._add_to_case(key, now, len(found), row.cents)
            for event in found:
                yield Row(card=key[0], time=row.time, event=event, findings=1, cents=row.cents)
        self._recent.update((recent,))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Close the case."""
        case = self._case.get()
        if case is not None:
            yield self._close_case(key, case)

    def close(self) -> None:
        """Do nothing: there are no resources."""

    def _add_to_case(self, key: Any, now: int, findings: int, cents: int) -> Iterator[Row]:
        case = self._case.get()
        if case is not None:
            self._handle.deleteTimer(case[0] + CASE_MS)
            # The watermark, and with it the timer, lags behind the payments: a case may have ended by their time.
            if case[0] + CASE_MS <= now:
                yield self._close_case(key, case)
                case = None
        _, old_findings, old_cents = case or (0, 0, 0)
        self._case.update((now, old_findings + findings, old_cents + cents))
        self._handle.registerTimer(now + CASE_MS)

    def _close_case(self, key: Any, case: tuple[Any, ...]) -> Row:
        last, findings, cents = case
        self._case.clear()
        return Row(card=key[0], time=_moment(last + CASE_MS), event="case", findings=findings, cents=cents)


def distance_km(a: tuple[float, float], b: tuple[float, float]) -> float:
    """Return the great-circle distance of two places, given in degrees of latitude and longitude."""
    (north_a, east_a), (north_b, east_b) = (tuple(map(math.radians, place)) for place in (a, b))
    half = math.sin((north_b - north_a) / 2) ** 2
    half += math.cos(north_a) * math.cos(north_b) * math.sin((east_b - east_a) / 2) ** 2
    return 2 * 6371 * math.asin(math.sqrt(half))


def _too_far(before: tuple[int, float, float], now: tuple[int, float, float]) -> bool:
    far = distance_km(before[1:], now[1:])
    return far > TRAVEL_KM and far > TRAVEL_KM_PER_H * (now[0] - before[0]) / 3_600_000


def build(spark: SparkSession, backend: ChangelogStateBackend, folder: Path) -> Any:
    """Build the query: each batch yields its findings and closed cases."""
    payments = read_files(spark, folder, PAYMENTS).withWatermark("time", "0 seconds")
    return backend.transform_with_state(payments.groupBy("card"), FraudRules(), EVENTS, "Append", "EventTime")


def write_input(folder: Path, cards: int = 400, files: int = 8) -> None:
    """Write four hours of payments, half an hour per file: honest ones, bursts, and cards used far away."""
    chance = random.Random(2026)
    slices: list[list[dict[str, Any]]] = [[] for _ in range(files)]
    for card in range(cards):
        home = chance.uniform(40, 55), chance.uniform(-5, 25)
        second = chance.expovariate(1 / 900)
        while second < 1800 * files:
            abroad = chance.random() < 0.01
            place = (-33.9, 151.2) if abroad else (home[0] + chance.gauss(0, 0.1), home[1] + chance.gauss(0, 0.1))
            cents = round(chance.lognormvariate(8, 1))
            slices[int(second / 1800)].append(_payment(f"card-{card:03d}", second, cents, place))
            # Most payments are far apart; some start a burst.
            second += 0.01 + (chance.expovariate(1 / 10) if chance.random() < 0.3 else chance.expovariate(1 / 900))
    # Payments of the next day move the watermark past all cases, so their timers fire.
    write_files(folder, [*slices, *([_payment("next day", 86_400 + second, 1, (0, 0))] for second in range(2))])


def _payment(card: str, second: float, cents: int, place: tuple[float, float]) -> dict[str, Any]:
    time = _moment(round((START_S + second) * 1000)).isoformat()
    return {"card": card, "time": time, "cents": cents, "latitude": place[0], "longitude": place[1]}


def _moment(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def show(events: pd.DataFrame) -> str:
    """Return a summary of the result, and the worst cases."""
    counts = ", ".join(f"{count} of {event!r}" for event, count in events["event"].value_counts().items())
    worst = events[events["event"] == "case"].sort_values("cents", ascending=False).head(5)
    return f"{len(events)} events: {counts}. The most expensive cases:\n{worst.to_string(index=False)}"


if __name__ == "__main__":
    sys.exit(main("Fraud rules with timers.", write_input, build, show))
