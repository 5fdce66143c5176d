"""
Kills and suspends a real service process at random moments, and verifies that no acknowledged data is lost or doubled.

Several drivers execute scripted batches against one service, on a local folder and on an S3 server, each with a model
of its expected state (`loadtest.chaos.driver`). The service is killed with SIGKILL 0-50 ms after a request, of each
kind in turn, and restarted, some hundred times. In between it hangs (SIGSTOP) for longer than every timeout while
another process replaces it, and then resumes beside that one. Its wall clock jumps by up to an hour in either
direction, and jobs are rewound by processes that are killed or suspended half way. Then all stored state is compared
with the models, garbage is collected, and everything is compared again (`loadtest.chaos.verify`).

``python -m loadtest.chaos_service [--kills N] [--seed N]`` prints the kills by phase and writes
``reports/chaos-service.json``; STRICT=1 makes it fail if a goal is missed. A seed repeats script and moments, but not
the machine's own timing.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from loadtest.chaos.driver import ScriptedDriver
from loadtest.chaos.forked_service import ForkedService
from loadtest.chaos.jumping_clock import HOUR_MS
from loadtest.chaos.phases import KINDS, Phases
from loadtest.chaos.rewinding import Fate, Rewinding
from loadtest.chaos.verify import Findings, verify
from storage.clock import SystemClock
from storage.leftovers import remove_leftovers
from storage.open import open_store
from tools.reporting.figures import Figure, Goal
from tools.reporting.target import TargetReport, positive
from tools.servers.s3_server import S3Server

KILLS = 200
KILLS_PER_HANG = 20
HANG_S = 12.0
"""Longer than every timeout of `SETTINGS` and of the drivers."""
RESUMED_S = 3.0
S3_SHARE = 0.3
JOBS = 3
KILL_WITHIN_S = 0.05
CLOCK_JUMP_SHARE = 0.4
BETWEEN = "none at all"
_PHASE_TIMEOUT_S = 60.0
_BUCKET = "chaos"
_AIMS = (*KINDS, "persist", "complete", "rewind")  # uploads and manifests more often

# All background work runs within seconds here, so that kills hit it as well.
SETTINGS = {
    "DSTL_CHECKPOINT_TIMEOUT_S": "5",
    "DSTL_GC_INTERVAL_S": "2",
    "DSTL_GC_AGE_MIN_S": "6",
    "DSTL_RETENTION_CHECKPOINTS_MAX": "3",
    "DSTL_RETENTION_DELAY_S": "1",
    "DSTL_COMPACTION_FLOOR_BYTES": "100000",
}


@dataclass(slots=True)
class Outcome:
    """The events of a run on one storage."""

    findings: Findings = field(default_factory=Findings)
    kills: Counter[str] = field(default_factory=Counter)
    running: Counter[str] = field(default_factory=Counter)
    checkpoints: int = 0
    persisted: int = 0
    repeated: int = 0
    restarted: int = 0
    hangs: int = 0
    clock_jumps: int = 0
    rewinds: Counter[tuple[Fate, bool]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class ChaosRun:
    """One storage with its service and its drivers; kills the service."""

    def __init__(self, storage: str, environment: Mapping[str, str], kills: int, seed: str) -> None:
        self.outcome = Outcome()
        self.storage = storage
        self._kills = kills
        self._random = random.Random(seed)
        self._phases = Phases()
        self._service = ForkedService(storage, {**SETTINGS, **environment})
        address = self._service.address
        rewinding = partial(Rewinding, storage, environment)
        self.drivers = [
            ScriptedDriver(f"job-{n}", address, f"{seed}/{n}", self._phases, rewinding) for n in range(JOBS)
        ]

    def run(self) -> None:
        """Kill, let the drivers finish, and verify."""
        with self._service:
            for driver in self.drivers:
                driver.start()
            try:
                self._kill_all()
            finally:
                for driver in self.drivers:
                    driver.stop()
                for driver in self.drivers:
                    driver.join()
        self._verify()

    def _kill_all(self) -> None:
        kinds = [_AIMS[number % len(_AIMS)] for number in range(self._kills)]
        self._random.shuffle(kinds)
        for number, kind in enumerate(kinds):
            if any(driver.failure is not None for driver in self.drivers):
                return
            if not self._phases.wait_for_next(kind, self._random.randint(1, 3), _PHASE_TIMEOUT_S):
                self.outcome.failures.append(f"no driver sent a request of kind {kind!r}")
                return
            time.sleep(self._random.uniform(0, KILL_WITHIN_S))
            if self._random.random() < CLOCK_JUMP_SHARE:
                self._service.clock.jump_to(self._random.choice((-HOUR_MS, 0, HOUR_MS)))
                self.outcome.clock_jumps += 1
            if number % KILLS_PER_HANG == KILLS_PER_HANG // 2:
                self._hang()
                continue
            self.outcome.running.update(self._phases.running() or [BETWEEN])
            self._phases.kills += 1
            self._service.kill()
            self.outcome.kills[kind] += 1
            self._service.start()

    def _hang(self) -> None:
        """Suspend the service for longer than every timeout, start another one, and let both run for a while."""
        self._phases.hangs += 1
        self._service.hang()
        self._service.start()
        time.sleep(HANG_S)
        self._service.resume()
        time.sleep(RESUMED_S)
        self._phases.kills += 1
        self._service.kill_resumed()
        self.outcome.hangs += 1

    def _verify(self) -> None:
        outcome, store = self.outcome, open_store(self.storage)
        for driver in self.drivers:
            outcome.checkpoints += driver.checkpoints
            outcome.persisted += driver.persisted
            outcome.repeated += driver.repeated
            outcome.restarted += driver.restarted
            outcome.rewinds += driver.rewinds
            if driver.failure is not None:
                outcome.failures.append(f"{driver.job}: {driver.failure!r}")
            verify(self.storage, store, driver, outcome.findings)
        remove_leftovers(store, SystemClock(), 0)  # no call runs any more, but a collection keeps such young leftovers
        outcome.findings.orphans += ["a leftover"] * remove_leftovers(store, SystemClock(), 0)
        store.close()


def run(kills: int, seed: int, folder: Path) -> tuple[list[Figure], list[Outcome]]:
    """
    Run both storages side by side.

    Args:
        kills: On both together.
        seed: Decides scripts and moments.
        folder: Empty folder for data.

    Returns:
        The figures, and the outcomes on the folder and on the S3 server.
    """
    started = time.monotonic()
    kills_local, kills_s3 = _shares(kills)
    with S3Server(folder / "s3") as server, _environment(server.env()):
        server.create_bucket(_BUCKET)
        runs = [
            ChaosRun((folder / "local").as_uri(), {}, kills_local, f"{seed}/local"),
            ChaosRun(f"s3://{_BUCKET}/chaos", server.env(), kills_s3, f"{seed}/s3"),
        ]
        threads = [threading.Thread(target=_run, args=[chaos]) for chaos in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    outcomes = [chaos.outcome for chaos in runs]
    return _figures(outcomes, kills, time.monotonic() - started), outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; print the outcome; return the exit code."""
    parser = argparse.ArgumentParser(description="Kill the service at random moments and verify the stored state.")
    parser.add_argument("--kills", type=positive, default=KILLS, help="on both storages together (default %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="repeats scripts and moments (default: a new one)")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}: repeat with --seed {seed} --kills {options.kills}", flush=True)
    report = TargetReport("chaos-service")
    folder = Path(tempfile.mkdtemp(prefix="dstl-chaos-"))
    try:
        figures, outcomes = run(options.kills, seed, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    running = sum((outcome.running for outcome in outcomes), Counter[str]())
    for kind in (*KINDS, BETWEEN):
        print(f"  {running[kind]:4} kills met a running request: {kind}")
    for outcome in outcomes:
        found = outcome.findings
        for text in (*outcome.failures, *found.lost, *found.different, *found.orphans):
            print(f"  {text}")
    for figure in figures:
        mark = "" if figure.goal is None else f"  (goal {figure.goal}: {'holds' if figure.holds else 'MISSED'})"
        print(f"  {figure.name:55} {figure.value:10,.0f} {figure.unit}{mark}")
    return report.write(figures)


def hangs_of(kills: int) -> int:
    """Return how many of a storage's kills are hangs instead."""
    return (kills + KILLS_PER_HANG // 2 - 1) // KILLS_PER_HANG


def _shares(kills: int) -> tuple[int, int]:
    """Return how many kills the local folder gets, and how many the S3 server."""
    kills_s3 = round(kills * S3_SHARE)
    return kills - kills_s3, kills_s3


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process, by which the verification finds the S3 server."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(chaos: ChaosRun) -> None:
    try:
        chaos.run()
    except Exception as error:  # noqa: BLE001 - reported as a failure of the run
        chaos.outcome.failures.append(repr(error))


def _figures(outcomes: Sequence[Outcome], kills: int, seconds: float) -> list[Figure]:
    none = Goal("==", 0)

    def total(name: str) -> int:
        values = [getattr(outcome.findings, name, None) for outcome in outcomes]
        return sum(len(value) if isinstance(value, list) else int(value or 0) for value in values)

    done = [sum(outcome.kills.values()) for outcome in outcomes]
    hangs = sum(outcome.hangs for outcome in outcomes)
    rewinds = sum((outcome.rewinds for outcome in outcomes), Counter[tuple[Fate, bool]]())
    by_kind = sum((outcome.kills for outcome in outcomes), Counter[str]())
    return [
        Figure("kills and hangs", sum(done) + hangs, "kills", Goal(">=", kills)),
        Figure("hangs beside a successor", hangs, "hangs", Goal(">=", sum(hangs_of(n) for n in _shares(kills)))),
        Figure("jumps of the wall clock", sum(outcome.clock_jumps for outcome in outcomes), "jumps"),
        *(
            Figure(
                f"rewinds, process {fate}: {'done' if is_done else 'nothing done'}", rewinds[fate, is_done], "rewinds"
            )
            for fate in Fate
            for is_done in (True, False)
        ),
        Figure("kills on the S3 server", done[1], "kills"),
        *(Figure(f"kills after a request began: {kind}", by_kind[kind], "kills") for kind in KINDS),
        Figure("checkpoints completed", sum(outcome.checkpoints for outcome in outcomes), "checkpoints"),
        Figure("batches executed again after a loss", sum(outcome.repeated for outcome in outcomes), "batches"),
        Figure("drivers started again", sum(outcome.restarted for outcome in outcomes), "starts"),
        Figure("change sets answered with a handle", sum(outcome.persisted for outcome in outcomes), "sets"),
        Figure("contradictions met by drivers", sum(len(outcome.failures) for outcome in outcomes), "cases", none),
        Figure("stored checkpoints compared", total("checkpoints"), "checkpoints"),
        Figure("handles of stored checkpoints verified", total("handles"), "handles"),
        Figure("stored checkpoints that name a lost set", total("lost"), "checkpoints", none),
        Figure("stored checkpoints with other content", total("different"), "checkpoints", none),
        Figure("orphans collected", total("collected"), "objects"),
        Figure("orphans left after garbage collection", total("orphans"), "objects", none),
        Figure("duration", seconds, "s"),
    ]


if __name__ == "__main__":
    sys.exit(main())
