"""
Sessions of clicks: a user's session ends after ten minutes without a click, by event time.

Clicks may arrive up to five minutes late and in any order, so a click may merge two sessions. An event-time timer emits
a session once, when the watermark shows that no further click can belong to it.
Spark's ``session_window`` computes the same over data at rest, and the tests compare with it.
"""

from __future__ import annotations

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

CLICKS = "user STRING, time TIMESTAMP, page STRING"
SESSIONS = "user STRING, begin TIMESTAMP, end TIMESTAMP, clicks BIGINT"
GAP_MS = 600_000


class Sessions(StatefulProcessor):
    """The state of a user: sessions that may still grow, each with its first and last click and their number."""

    _STATE = "open ARRAY<STRUCT<first: BIGINT, last: BIGINT, clicks: BIGINT>>"

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state."""
        self._handle = handle
        self._sessions = handle.getValueState("sessions", self._STATE)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any = None) -> Iterator[Row]:  # noqa: N802, N803
        """Add clicks to sessions, and set a timer for the end of each changed session."""
        sessions = self._open()
        before = set(sessions)
        for row in rows:
            first = last = round(row.time.timestamp() * 1000)
            clicks = 1
            apart = []
            for session in sessions:
                if session[0] < last + GAP_MS and first < session[1] + GAP_MS:
                    first, last, clicks = min(first, session[0]), max(last, session[1]), clicks + session[2]
                else:
                    apart.append(session)
            sessions = [*apart, (first, last, clicks)]
        for _, last, _ in set(sessions) - before:
            self._handle.registerTimer(last + GAP_MS)
        self._sessions.update((sessions,))
        yield from ()

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Emit the session that ends now; there is none if a later click has extended it."""
        sessions = self._open()
        left = []
        for first, last, clicks in sessions:
            if last + GAP_MS == expiredTimerInfo.getExpiryTimeInMs():
                yield Row(user=key[0], begin=_moment(first), end=_moment(last + GAP_MS), clicks=clicks)
            else:
                left.append((first, last, clicks))
        if left:
            self._sessions.update((left,))
        else:
            self._sessions.clear()

    def close(self) -> None:
        """Do nothing: there are no resources."""

    def _open(self) -> list[tuple[int, int, int]]:
        stored = self._sessions.get()
        return [] if stored is None else [tuple(session) for session in stored[0]]


def build(spark: SparkSession, backend: ChangelogStateBackend, folder: Path) -> Any:
    """Build the query: each batch yields the sessions that have ended."""
    clicks = read_files(spark, folder, CLICKS).withWatermark("time", "5 minutes")
    return backend.transform_with_state(clicks.groupBy("user"), Sessions(), SESSIONS, "Append", "EventTime")


def write_input(folder: Path, users: int = 300, files: int = 8) -> None:
    """Write four hours of clicks, half an hour per file, some of them late."""
    chance = random.Random(2026)
    slices: list[list[dict[str, Any]]] = [[] for _ in range(files)]
    for user in range(users):
        second = chance.expovariate(1 / 600)
        while second < 1800 * files:
            came = second + chance.choice([0, 0, chance.random() * 240])
            page = chance.choice(["home", "search", "item", "cart"])
            slices[min(int(came / 1800), files - 1)].append(_click(f"user-{user:03d}", second, page))
            second += chance.expovariate(1 / 40) if chance.random() < 0.9 else chance.expovariate(1 / 1500)
    # Clicks of the next day move the watermark past all sessions, so they end.
    write_files(folder, [*slices, *([_click("next day", 86_400, "home")],) * 2])


def _click(user: str, second: float, page: str) -> dict[str, Any]:
    return {"user": user, "time": _moment(round((START_S + second) * 1000)).isoformat(), "page": page}


def _moment(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def show(sessions: pd.DataFrame) -> str:
    """Return a summary of the result, and the longest sessions."""
    minutes = (sessions["end"] - sessions["begin"]).dt.total_seconds() / 60 - GAP_MS / 60_000
    longest = sessions.assign(minutes=minutes.round(1)).sort_values("minutes", ascending=False).head(5)
    return (
        f"{len(sessions)} sessions of {sessions['user'].nunique()} users, {sessions['clicks'].mean():.1f} clicks and "
        f"{minutes.mean():.1f} minutes on average. The longest:\n{longest.to_string(index=False)}"
    )


if __name__ == "__main__":
    sys.exit(main("Sessions of clicks, by event-time timers.", write_input, build, show))
