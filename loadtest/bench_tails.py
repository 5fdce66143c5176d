"""
``make bench-tails``: the slowest persists at a store with a long tail, by the rule that starts a second attempt.

The service's own uploader runs on a virtual clock at a store that draws the latency of each PUT from the profile
`s3-standard`, so that 20,000 persists take seconds instead of hours. Each rule gets the same seed.
Writes ``reports/bench-tails.json``; STRICT=1 makes it fail if a goal is missed.
"""

from __future__ import annotations

import asyncio
import sys
from random import Random

from dstl_service.uploads.settings import UploadSettings
from loadtest.bench_service import line_of
from loadtest.virtual_uploads import VirtualStore, change_set, uploader
from tools.reporting.figures import Figure, Goal, percentile
from tools.reporting.target import TargetReport, is_set
from tools.servers.faults.store_profiles import PROFILES, SMALL_BYTES_MAX

PERSISTS, PERSISTS_SHORT = 20_000, 1_000
PAUSE_S = 0.2
_SEED = 158
_SIZES = {"small": SMALL_BYTES_MAX // 2, "large": 2 * SMALL_BYTES_MAX}
RULES: dict[str, UploadSettings] = {
    "one attempt": UploadSettings(attempts_max=1, timeout_ms=60_000, hedge_share_max=0),
    "time-out of 1 s": UploadSettings(hedge_share_max=0),
    "running p90": UploadSettings(),
}
"""By name; the last one is the default."""


class TailBench:
    """
    One rule at one line of the profile.

    Args:
        size_bytes: Of each change set; it decides the line.
        settings: The rule.
    """

    def __init__(self, size_bytes: int, settings: UploadSettings) -> None:
        self.persists_ms: list[float] = []
        self._store = VirtualStore(PROFILES["s3-standard"], Random(_SEED))
        self._store.size_bytes = size_bytes
        self._uploader = uploader(settings)
        self._set = change_set(size_bytes)

    @property
    def puts(self) -> int:
        """Number of PUTs."""
        return self._store.puts

    def run(self, persists: int) -> None:
        """Persist one set after the other, with a pause after each."""
        self._store.run(self._persist_all(persists))

    async def _persist_all(self, persists: int) -> None:
        ends = []
        for _ in range(persists):
            began_s = self._store.loop.time()
            upload = self._uploader.begin("job", [self._set])
            await upload.stored()
            self.persists_ms.append((self._store.loop.time() - began_s) * 1000)
            ends.append(asyncio.ensure_future(upload.ended()))
            await asyncio.sleep(PAUSE_S)
        await asyncio.gather(*ends)


def measure(*, short: bool = False) -> list[Figure]:
    """Return percentiles of persist and extra PUTs, of each rule and line."""
    persists = PERSISTS_SHORT if short else PERSISTS
    figures = []
    for line, size_bytes in _SIZES.items():
        for rule, settings in RULES.items():
            bench = TailBench(size_bytes, settings)
            bench.run(persists)
            figures += _figures(f"{line}, {rule}", bench, has_goals=line == "large" and rule == "running p90")
    return figures


def _figures(name: str, bench: TailBench, *, has_goals: bool) -> list[Figure]:
    extra = bench.puts / len(bench.persists_ms) - 1
    tail_goal, puts_goal = (Goal("<=", 1_400), Goal("<=", 0.12)) if has_goals else (None, None)
    return [
        Figure(f"persist p50, {name}", percentile(bench.persists_ms, 50), "ms"),
        Figure(f"persist p99, {name}", percentile(bench.persists_ms, 99), "ms"),
        Figure(f"persist p99.9, {name}", percentile(bench.persists_ms, 99.9), "ms", tail_goal),
        Figure(f"PUTs more than persists, {name}", extra, "share", puts_goal),
    ]


def main() -> int:
    """Measure and report; return the exit code."""
    report = TargetReport("bench-tails")
    figures = measure(short=is_set("SHORT"))
    for figure in figures:
        print(line_of(figure))
    return report.write(figures)


if __name__ == "__main__":
    sys.exit(main())
