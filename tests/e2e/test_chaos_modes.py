"""
Modes of failover, standbys and rescales while processes die, hang or get a wrong clock (I2, I4, I14, I16).

Steps: as in `test_chaos`, but on a cluster of three hosts, in the short form two, each with a local folder of its own.
Each job's mode, its patience, whether its tables have copies, its parallelism and the event that meets it are drawn
from the seed; among the events are a change of parallelism, a fork, and a driver that is killed while rows wait in the
log. Each start of a job, or of a fork, has another name for the operator. At the end all output and the stored state
are compared with those of an undisturbed computation: with ``exact`` and ``deferred`` they are equal, with
``bounded-loss`` they are those without exactly the rows that the job lists as lost. A fork, which runs over the rest of
the input when its parent has ended, has the state of an undisturbed job from its checkpoint on.

DSTL_CHAOS_SEED repeats a run, DSTL_CHAOS_RUNS sets the number of jobs; ``make chaos`` is the long form.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dstl_service.registry.job_store import JobStore
from dstl_service.wire import RowsSetAside
from loadtest.chaos.jumping_clock import ClockOffset
from storage.clock import SystemClock, SystemIds
from storage.open import open_store
from tests.e2e.chaos_events import EVENTS_OF_MODES, WAITING, Scene, clock_environment, wait_for
from tests.e2e.chaos_program import FORK, HELD_BACK
from tests.e2e.support import expected_output, expected_state, random_input, stored_totals, write_input
from tests.e2e.test_chaos import Rows, executed_batches
from tests.sidecars import end_sidecars
from tests.support.seeds import chosen_seed
from tools.servers.spark.cluster import Loopback, SparkCluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3000)]

BATCHES = 6
WITHIN_S = 5.0
RUNS = int(os.environ.get("DSTL_CHAOS_RUNS", "1"))
HOSTS = 3 if RUNS > 1 else 2
FIRST = (("deferred", WAITING), ("bounded-loss", "executor killed"))
"""Mode and event of the first job are one of these."""
SETTINGS = {
    "executor.memory": "700m",
    "executor.cores": 1,
    "cores.max": HOSTS,
    "scheduler.minRegisteredResourcesRatio": "1.0",
    "scheduler.maxRegisteredResourcesWaitingTime": "60s",
    "shuffle.reduceLocality.enabled": "false",
    "locality.wait": "500ms",
}


class _Host(Loopback):
    def __init__(self, number: int) -> None:
        self.address = f"127.0.0.{number + 2}"


class Job(NamedTuple):
    """A job: the options of its backend, its event, and its rows by file."""

    options: dict[str, Any]
    event: str
    files: list[Rows]


def drawn(chance: random.Random, number: int) -> Job:
    """Draw a job; in the short form there is only the first one."""
    mode = chance.choice(("exact", "deferred", "bounded-loss"))
    event = chance.choice([name for name in EVENTS_OF_MODES if name != WAITING or mode == "deferred"])
    if number == 0:
        mode, event = chance.choice(FIRST)
    options = {
        "failover": mode,
        # With the shortest one, rows wait although nothing is lost.
        "failover_patience_s": 0.0001 if event == WAITING or number == 0 else chance.choice((0.001, 0.05, 1.0)),
        "max_stall_s": 3.0,
        "max_lost_fraction": 0.9,
        "standby_replicas": chance.choice((0, 1)),
        "parallelism": chance.choice((2, 3, 4)),
    }
    return Job(options, event, random_input(chance.randrange(1 << 32), BATCHES, rows=120, keys=24))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """Return the jobs on their cluster; all processes are ended."""
    seed = chosen_seed("DSTL_CHAOS_SEED")
    print(f"DSTL_CHAOS_SEED={seed}")
    with tempfile.TemporaryDirectory(prefix="dstl-", ignore_cleanup_errors=True) as place:
        folder, locals_ = tmp_path, Path(place)
        clock = ClockOffset(folder / "sidecar-clock")
        hosts = [{"DSTL_LOCAL_DIR": str(locals_ / str(number)), **clock_environment(clock)} for number in range(HOSTS)]
        with SparkCluster(folder, hosts, machines=[Loopback(), *map(_Host, range(HOSTS))]) as cluster:
            made = Scene(
                folder,
                f"file://{folder}/store",
                locals_,
                [f"job-{number}" for number in range(RUNS)],
                random.Random(seed),
                clock,
                arguments=["--master", cluster.master_url, "--settings", json.dumps(SETTINGS)],
                cluster=cluster.pids,
            )
            yield made
            for program in made.programs:
                program.close()
        end_sidecars(locals_)


def test_modes_lose_what_they_list(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """I14, I17: output and state equal an undisturbed computation, in bounded-loss without exactly the listed rows."""
    monkeypatch.setenv("DSTL_LOCAL_DIR", str(scene.local_dir / "driver"))
    jobs = {name: drawn(scene.chance, number) for number, name in enumerate(scene.jobs)}
    for name, job in jobs.items():
        folder = scene.folder / name
        write_input(folder / "in", job.files)
        (folder / "in" / f"{BATCHES - 1:05d}.json").rename(folder / HELD_BACK)
        (folder / "options.json").write_text(json.dumps(job.options), encoding="utf-8")
        hold = "waiting" if job.event == WAITING else str(scene.chance.randrange(2, BATCHES - 1))
        (folder / "hold").write_text(hold, encoding="utf-8")
    scene.start()

    met, wrong = 0, []
    for name, job in jobs.items():
        wait_for(scene.program, scene.folder / name / "started")
        time.sleep(scene.chance.uniform(0, WITHIN_S))  # the time is the test's input
        is_met = not scene.done(name).exists() and EVENTS_OF_MODES[job.event](scene, name)
        (scene.folder / name / "met").touch()
        wait_for(scene.program, scene.done(name))
        lost = lost_rows(scene, name)
        if (scene.folder / f"{name}{FORK}").exists():
            wait_for(scene.program, scene.done(f"{name}{FORK}"))
            wrong += [(f"{name}{FORK}", job.options, job.event, what) for what in fork_differences(scene, name, job)]
        met += is_met
        wrong += [(name, job.options, job.event, what) for what in differences(scene, name, job, lost)]
        print(f"{name}: {job.options}, {job.event} {is_met}, {sum(entry.rows for entry in lost)} rows lost")

    assert wrong == []
    assert met >= RUNS * 0.6


def fork_differences(scene: Scene, name: str, job: Job) -> list[str]:
    """Return how a fork differs from its parent until it began, and from an undisturbed job since."""
    store = JobStore(open_store(scene.storage), f"{name}{FORK}", SystemClock(), SystemIds())
    store.open(None)
    assert store.origin is not None
    until = store.origin.checkpoint.id
    lost = [entry for entry in lost_rows(scene, name) if entry.checkpoint_id <= until]
    batches = executed_batches(scene.folder / name / "chk", job.files)[: until + 1]
    rest = job.files[sum(map(len, batches)) // len(job.files[0]) :]
    kept = [*without(scene, batches, lost), *rest]
    findings = {
        "losses": sorted(map(str, lost_rows(scene, f"{name}{FORK}"))) != sorted(map(str, lost)),
        "state": stored_totals(scene.storage, f"{name}{FORK}") != expected_state(kept),
    }
    return [what for what, differs in findings.items() if differs]


def lost_rows(scene: Scene, job: str) -> list[RowsSetAside]:
    """Return what a job lists as lost; nothing may be waiting."""
    newest = JobStore(open_store(scene.storage), job, SystemClock(), SystemIds()).newest()
    assert newest is not None
    listed = [entry for operator in newest.operators for entry in operator.set_aside]
    assert all(entry.is_lost for entry in listed if entry.rows)
    return listed


def differences(scene: Scene, name: str, job: Job, lost: list[RowsSetAside]) -> list[str]:
    """Return how a job differs from an undisturbed one that never had the lost rows."""
    batches = executed_batches(scene.folder / name / "chk", job.files)
    kept = without(scene, batches, lost)
    files = [scene.folder / name / f"out-{batch}.json" for batch in range(len(batches))]
    output = [tuple(row) for file in files for row in json.loads(file.read_text(encoding="utf-8"))]
    wanted = [row for rows in expected_output(kept).values() for row in rows]
    findings = {
        "loss": sum(entry.rows for entry in lost) != sum(map(len, batches)) - sum(map(len, kept)),
        "loss in another mode": bool(lost) and job.options["failover"] != "bounded-loss",
        "output": sorted(output, key=repr) != sorted(wanted, key=repr),
        "state": stored_totals(scene.storage, name) != expected_state(kept),
    }
    return [what for what, differs in findings.items() if differs]


def without(scene: Scene, batches: list[Rows], lost: list[RowsSetAside]) -> list[Rows]:
    """Return the rows of batches without the lost ones."""
    groups = dict(map(tuple, json.loads((scene.folder / "groups.json").read_text(encoding="utf-8"))))

    def is_lost(batch: int, key: str | None) -> bool:
        return any(entry.checkpoint_id == batch and entry.key_groups.contains(groups[key]) for entry in lost)

    return [[row for row in rows if not is_lost(batch, row[0])] for batch, rows in enumerate(batches)]
