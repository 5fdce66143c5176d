"""
Exactly-once state and output while processes die, hang or get a wrong clock (I2, I4, I7, I12, I14, I18).

Steps: small jobs run one after the other on a cluster of real executor processes, and an event, in the short form two,
meets each at a random moment: the driver (Python and JVM, with its executors left alive), an executor, a Python worker
or the sidecar is killed with SIGKILL; an executor or the sidecar hangs (SIGSTOP) for longer than every time-out and
resumes; the sidecar's clock moves by an hour; the job is set back while its query runs. Ended processes are started
again. At the end every job's output, batch by batch, and its stored state are compared with those of an undisturbed
computation.

A failure means that a change was lost, counted twice, or taken from an attempt that Spark did not accept.
DSTL_CHAOS_SEED repeats a run, DSTL_CHAOS_RUNS sets the number of jobs of the long form, DSTL_REPORTS names a folder for
the figures; ``make chaos`` is the long form.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle, islice, pairwise
from pathlib import Path

import pytest

from dstl_service.collection.garbage_collector import collect_garbage
from dstl_service.formats.manifest import object_keys
from dstl_service.formats.under_way import uid_in_key
from dstl_service.registry.job_store import JobStore
from loadtest.chaos.jumping_clock import ClockOffset
from storage.clock import SystemClock, SystemIds
from storage.open import open_store
from tests.e2e.chaos_events import EVENTS, Scene, wait_for
from tests.e2e.support import expected_output, expected_state, random_input, stored_totals, write_input
from tests.support.seeds import chosen_seed
from tools.reporting.figures import Figure, Goal
from tools.reporting.target import TargetReport

pytestmark = pytest.mark.e2e

TOGETHER = (
    ("executor killed", "executor hung"),
    ("sidecar's clock moved", "driver killed"),
    ("worker killed", "sidecar killed"),
    ("sidecar hung", "job set back"),
)
"""The events of each job of the short form: starting a program or a query costs more than running it."""
RUNS = int(os.environ.get("DSTL_CHAOS_RUNS", "0"))
EVENTS_OF_JOBS: list[tuple[str, ...]] = [*islice(cycle((name,) for name in EVENTS), RUNS)] or [*TOGETHER]
HITS_MIN = sum(map(len, EVENTS_OF_JOBS)) * 0.6
BATCHES = 6
WITHIN_S = 5.0
Rows = list[tuple[str | None, float]]


@pytest.fixture
def scene(tmp_path: Path, local_dir: Path) -> Iterator[Scene]:
    """Return the jobs with their storage; remaining processes of the programs are ended."""
    seed = chosen_seed("DSTL_CHAOS_SEED")
    print(f"DSTL_CHAOS_SEED={seed}")
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    jobs = [f"job-{number}" for number in range(len(EVENTS_OF_JOBS))]
    made = Scene(
        folder, f"file://{folder}/store", local_dir, jobs, random.Random(seed), ClockOffset(folder / "sidecar-clock")
    )
    yield made
    for program in made.programs:
        program.close()


@pytest.mark.timeout(3000)
def test_disturbed_jobs_equal_undisturbed_ones(scene: Scene) -> None:
    """I14: output and state of every job equal an undisturbed computation, whatever was killed, hung or moved."""
    folder = os.environ.get("DSTL_REPORTS")
    report = TargetReport("chaos", Path(folder)) if folder else None
    inputs = {job: random_input(scene.chance.randrange(1 << 32), BATCHES, rows=120, keys=24) for job in scene.jobs}
    for job, files in inputs.items():
        write_input(scene.folder / job / "in", files)
        (scene.folder / job / "hold").write_text(str(scene.chance.randrange(2, BATCHES)), encoding="utf-8")
    scene.start()

    hits = dict.fromkeys(EVENTS, 0)
    for job, names in zip(scene.jobs, EVENTS_OF_JOBS, strict=True):
        wait_for(scene.program, scene.folder / job / "started")
        for name in names:
            time.sleep(scene.chance.uniform(0, WITHIN_S))  # the time is the test's input
            if not scene.done(job).exists():
                hits[name] += EVENTS[name](scene, job)
        (scene.folder / job / "met").touch()
        wait_for(scene.program, scene.done(job))

    print(f"events that met a running job: {hits}")
    wrong = [(job, what) for job, files in inputs.items() for what in differences(scene, job, files)]
    if report is not None:
        report.write(figures(hits, wrong))
    assert sum(hits.values()) >= HITS_MIN
    assert wrong == []


def differences(scene: Scene, job: str, files: list[Rows]) -> list[str]:
    """Return how a job differs from an undisturbed one, after garbage collection."""
    store = open_store(scene.storage)
    manifests = JobStore(store, job, SystemClock(), SystemIds())
    collect_garbage(store, manifests, job, SystemClock(), age_min_ms=0)
    batches = executed_batches(scene.folder / job / "chk", files)
    output = {
        batch: [tuple(row) for row in json.loads((scene.folder / job / f"out-{batch}.json").read_text())]
        for batch in range(len(batches))
    }
    named = {key for manifest in manifests.completed() for key in object_keys(manifest)}
    named |= manifests.savepoints.object_keys()
    stored = {info.key for info in store.list(f"{job}/segments/")}
    listed = list(manifests.completed())[-1].under_way.uids
    findings = {
        "output": output != expected_output(batches),
        "state": stored_totals(scene.storage, job) != expected_state(files),
        "objects": {key for key in stored if uid_in_key(key) not in listed} != named,
    }
    return [what for what, differs in findings.items() if differs]


def figures(hits: dict[str, int], wrong: list[tuple[str, str]]) -> list[Figure]:
    """Return the figures of the events."""
    return [
        *(Figure(f"a running job's {name}", count, "events") for name, count in hits.items()),
        Figure("events that met a running job", sum(hits.values()), "events", Goal(">=", HITS_MIN)),
        Figure("wrong outputs, states and objects", len(wrong), "jobs", Goal("==", 0)),
    ]


def executed_batches(checkpoint: Path, files: list[Rows]) -> list[Rows]:
    """
    Return the rows of each batch according to Spark's offsets.

    Spark's file source records a file before the batch is finally planned, so after a driver's death in between the
    next run reads that file and the following one in one batch.
    """
    entries = sorted(
        (path for path in (checkpoint / "offsets").iterdir() if path.name.isdigit()), key=lambda p: int(p.name)
    )
    ends = [json.loads(path.read_text().splitlines()[-1])["logOffset"] + 1 for path in entries]
    assert ends[-1] == len(files)
    return [[row for rows in files[begin:end] for row in rows] for begin, end in pairwise([0, *ends])]
