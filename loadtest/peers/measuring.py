"""Measures one engine at one shape: a run to the end, and one that is killed and started again."""

from __future__ import annotations

import json
import random
import signal
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.peers.checking import rows_of_files, wrong_keys
from loadtest.peers.engines import Engine, Job
from loadtest.peers.jobs.progress import key_of
from loadtest.peers.kafka_rows import new_consumer, put_events, rows_of_topic, rows_stored
from loadtest.peers.running import Run, rows_made, steady_rate
from tools.servers.kafka import KafkaBroker

_TIMEOUT_S = 900.0
_LAST_ROWS_S = 20.0
_KILL_AT = (0.3, 0.7)


@dataclass(frozen=True, slots=True)
class Shape:
    """Events of the fastest engines, and keys."""

    events: int
    keys: int


@dataclass(frozen=True, slots=True)
class Result:
    """
    The result of an engine for a shape.

    Args:
        events: How many it got.
        events_per_s: Rows per second, over the second half of the rows.
        cpu_s: CPU time per million events, start included.
        memory_mb: The most memory of all its processes at one time.
        checkpoint_ms: Median duration of a checkpoint, where the engine tells.
        wrong: Keys with a wrong count at the end.
    """

    events: int
    events_per_s: float
    cpu_s: float
    memory_mb: float
    checkpoint_ms: float | None
    wrong: int


def measured(engine: Engine, shape: Shape) -> Result:
    """Run an engine to the end, undisturbed."""
    with _job(engine, shape) as job:
        run = Run(engine.start(job), job.folder)
        seen: list[float] = []
        with _enough(engine, job) as is_enough:
            run.execute(_TIMEOUT_S, _looking(is_enough, run, seen))
        rate = steady_rate(job.folder) if engine.tells else None
        return Result(
            job.events,
            rate or job.events / run.took_s,
            run.usage.cpu_s / job.events * 1e6,
            run.usage.memory_bytes / 1e6,
            _checkpoint_ms(job, seen),
            _wrong(engine, job),
        )


def wrong_after_kill(engine: Engine, shape: Shape, usual_s: float) -> int:
    """
    Kill all processes of an engine at once at a random moment, start it again, and return the keys that are wrong.

    Args:
        engine: The engine.
        shape: What it does.
        usual_s: How long that takes; it decides the moment for an engine that does not tell of its rows.
    """
    with _job(engine, shape) as job:
        share, begun_s = random.uniform(*_KILL_AT), time.monotonic()

        def is_due() -> bool:
            if engine.tells:
                return rows_made(job.folder) >= share * job.events
            return time.monotonic() - begun_s >= share * usual_s

        Run(engine.start(job), job.folder).execute(_TIMEOUT_S, is_due, signal.SIGKILL)
        with _enough(engine, job) as is_enough:
            Run(engine.start(job), job.folder).execute(_TIMEOUT_S, is_enough)
        return _wrong(engine, job)


@contextmanager
def _job(engine: Engine, shape: Shape) -> Iterator[Job]:
    """Prepare the input of a job, and Kafka where it is needed."""
    events = max(1, round(shape.events * engine.share / shape.keys)) * shape.keys
    with ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True))
        job = Job(events, shape.keys, Path(place))
        if engine.has_kafka:
            broker = stack.enter_context(KafkaBroker())
            put_events(broker.servers, events, shape.keys)
            job = replace(job, brokers=broker.servers)
        if engine.requirements == "pathway":
            _write_lines(job)
        yield job


@contextmanager
def _enough(engine: Engine, job: Job) -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether all rows are there, for engines that do not end by themselves."""
    if not engine.has_kafka:
        yield lambda: False
        return
    consumer, last = new_consumer(job.brokers), [0, time.monotonic()]

    def is_enough() -> bool:
        """Return whether there are enough rows and none has come for a while: the last transaction is committed."""
        stored = rows_stored(consumer)
        if stored != last[0]:
            last[:] = [stored, time.monotonic()]
        quiet_s = time.monotonic() - last[1]
        return (stored >= job.events and quiet_s > 3) or (stored > 0 and quiet_s > _LAST_ROWS_S)

    yield is_enough
    consumer.close()


def _looking(is_enough: Callable[[], bool], run: Run, seen: list[float]) -> Callable[[], bool]:
    """Ask Flink's own interface for the durations of its checkpoints meanwhile."""

    def look() -> bool:
        if port := run.variable("PEER_PORT"):
            seen[:] = _flink_checkpoints_ms(port) or seen
        return is_enough()

    return look


def _flink_checkpoints_ms(port: str) -> list[float]:
    with suppress(OSError, ValueError, KeyError, IndexError):
        jobs = _asked(port, "jobs")["jobs"]
        history = _asked(port, f"jobs/{jobs[0]['id']}/checkpoints")["history"]
        return [float(one["end_to_end_duration"]) for one in history if one["status"] == "COMPLETED"]
    return []


def _asked(port: str, path: str) -> dict[str, list[dict[str, str]]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=2) as answer:
        found: dict[str, list[dict[str, str]]] = json.load(answer)
    return found


def _checkpoint_ms(job: Job, seen: list[float]) -> float | None:
    own = job.folder / "checkpoints_ms"
    if own.exists():
        seen = [float(line) for line in own.read_text(encoding="ascii").split()]
    return statistics.median(seen) if seen else None


def _wrong(engine: Engine, job: Job) -> int:
    rows = rows_of_topic(job.brokers) if engine.has_kafka else rows_of_files(job.folder / "out")
    return wrong_keys(rows, job.events, job.keys)


def _write_lines(job: Job) -> None:
    folder = job.folder / "in"
    folder.mkdir()
    with (folder / "events.csv").open("w", encoding="ascii") as file:
        file.write("k,v\n")
        file.writelines(f"{key_of(number, job.keys)},{number}\n" for number in range(job.events))
