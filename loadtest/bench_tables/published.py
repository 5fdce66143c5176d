"""
The values that Flink publishes for its changelog, on and off. Values only.

Source: the post about the changelog on Flink's own site, of 30 May 2022: parallelism 50, task managers of 4 slots,
50,000 events/s, RocksDB, S3, materialization every three minutes, 21 hours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

PARALLELISM = 50
SLOTS_PER_HOST = 4
EVENTS_PER_S = 50_000
PERCENTS = (50.0, 90.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class OnOff:
    """A quantity at `PERCENTS`, with the changelog on and off."""

    on: tuple[float, float, float, float]
    off: tuple[float, float, float, float]

    def ratio(self, place: int) -> float:
        """Return off divided by on at a percentile, by its place in `PERCENTS`."""
        return self.off[place] / self.on[place]


@dataclass(frozen=True, slots=True)
class Published:
    """One of the two tables: durations in ms, sizes in MB."""

    duration_ms: OnOff
    checkpointed_mb: OnOff
    full_mb: OnOff
    recovery_s: tuple[str, str]
    """On and off, as printed; "-" where nothing is published."""


TABLES: Mapping[str, Published] = MappingProxyType(
    {
        "value-state": Published(
            OnOff((311, 664, 1_000, 1_000), (5_000, 6_000, 7_000, 10_000)),
            OnOff((14.8, 23.5, 36.6, 52.8), (3_050, 4_520, 5_190, 6_490)),
            OnOff((24_200, 25_200, 25_600, 25_700), (18_500, 19_300, 19_600, 19_800)),
            ("35 to 65 s", "20 to 21 s"),
        ),
        "sliding-window": Published(
            OnOff((791, 1_000, 1_000, 2_000), (1_000, 1_000, 6_000, 6_000)),
            OnOff((269, 292, 310, 324), (1_180, 1_360, 1_670, 1_870)),
            OnOff((85_500, 97_400, 103_000, 104_000), (1_990, 2_160, 2_260, 2_300)),
            ("-", "-"),
        ),
    }
)
"""By workload."""
