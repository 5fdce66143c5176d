"""The engines: how each is started, and its properties that are not comparable with the others'."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.peers.running import Command
from tools.servers.environments import environment
from tools.servers.programs import PROJECT_ROOT, free_port

JOBS = Path(__file__).with_name("jobs")


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be done: events on keys, in a folder, with Kafka's address where an engine needs it."""

    events: int
    keys: int
    folder: Path
    brokers: str = ""

    def variables(self, **more: str) -> dict[str, str]:
        """Return the environment of a job's program."""
        known = {"PEER_EVENTS": str(self.events), "PEER_KEYS": str(self.keys), "PEER_FOLDER": str(self.folder)}
        return {**known, "PEER_BROKERS": self.brokers, **more}


@dataclass(frozen=True, slots=True)
class Engine:
    """
    An engine.

    Args:
        name: As the report has it.
        start: Returns the processes that do a job.
        share: Of the events that the fastest engines get; slow ones get less, so that all end in time.
        differs: Its properties that are not comparable.
        requirements: Its requirements, or an empty text for this project's own environment.
        has_kafka: Whether events and rows are in Kafka.
        tells: Whether its job tells of its rows while it makes them.
    """

    name: str
    start: Callable[[Job], Sequence[Command]]
    share: float
    differs: str
    requirements: str = ""
    has_kafka: bool = False
    tells: bool = True


def peer_python(requirements: str) -> str:
    """Return the interpreter of a peer's environment, made if missing; `ServerError` if it cannot be installed."""
    pins = Path(__file__).with_name(f"requirements-{requirements}.txt")
    return str(environment(f"peer-{requirements}", pins) / "bin" / "python")


def _ours(api: str) -> Callable[[Job], Sequence[Command]]:
    def start(job: Job) -> Sequence[Command]:
        arguments = [sys.executable, "-m", "loadtest.peers.spark_job"]
        return [Command(arguments, job.variables(PEER_API=api), PROJECT_ROOT)]

    return start


def _bytewax(job: Job) -> Sequence[Command]:
    """Two processes of one cluster, with a store for its recovery that is made before the first run."""
    python, ports = peer_python("bytewax"), (free_port(), free_port())
    state = job.folder / "state"
    if not state.exists():
        state.mkdir(parents=True)
        subprocess.run([python, "-m", "bytewax.recovery", str(state), "2"], check=True)
    flags = ["-a", ";".join(f"127.0.0.1:{port}" for port in ports), "-r", str(state), "-s", "1", "-b", "0"]
    program = [python, "-m", "bytewax.run", "bytewax_job:flow", *flags, "-i"]
    variables = job.variables(PYTHONPATH=str(JOBS))
    return [Command([*program, str(number)], variables, JOBS) for number in range(2)]


def _quix(job: Job) -> Sequence[Command]:
    python = peer_python("quixstreams")
    program = [python, str(JOBS / "quix_job.py")]
    return [Command(program, job.variables(PEER_NUMBER=str(number)), JOBS) for number in range(2)]


def _pathway(job: Job) -> Sequence[Command]:
    program = [peer_python("pathway"), str(JOBS / "pathway_job.py")]
    return [Command(program, job.variables(PATHWAY_THREADS="2"), JOBS)]


def _flink(mode: str, changelog: str) -> Callable[[Job], Sequence[Command]]:
    def start(job: Job) -> Sequence[Command]:
        python = peer_python("apache-flink")
        packages = next((Path(python).parents[1] / "lib").glob("python3*")) / "site-packages"
        more = {"PEER_MODE": mode, "PEER_CHANGELOG": changelog, "PEER_PYTHON": python, "PEER_PORT": str(free_port())}
        variables = job.variables(**more, PYTHONPATH=f"{JOBS}:{packages}")
        return [Command([python, str(JOBS / "flink_job.py")], variables, JOBS)]

    return start


_FLINK = "Python per event; files of a checkpoint are not flushed to disk"
OURS = ("Row API", "columnar", "Spark's own operator")
ENGINES: Mapping[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("Row API", _ours("row"), 1.0, "Python per event; change sets are flushed to disk, one per batch"),
        Engine("columnar", _ours("columnar"), 1.0, "no Python per event; one row per key and batch, not per event"),
        Engine("Spark's own operator", _ours("spark"), 0.3, "Python per event; its changelog is not flushed to disk"),
        Engine(
            "Quix Streams",
            _quix,
            0.5,
            "Python per event; reads and writes Kafka, whose processor time and memory are not counted; state is "
            "durable in Kafka, which flushes nothing to disk",
            "quixstreams",
            has_kafka=True,
        ),
        Engine(
            "Bytewax",
            _bytewax,
            1.0,
            "Python per event; its state is in memory, and its changes are in SQLite; rows after the last snapshot "
            "come again after a kill",
            "bytewax",
        ),
        Engine(
            "Pathway",
            _pathway,
            1.0,
            "no Python per event; its state is in memory; one row per key and batch of its own, not per event; its "
            "start counts, because it does not tell of its rows",
            "pathway",
            tells=False,
        ),
        Engine("PyFlink, threads", _flink("thread", "0"), 0.1, _FLINK, "apache-flink"),
        Engine("PyFlink, threads, changelog", _flink("thread", "1"), 0.1, _FLINK, "apache-flink"),
        Engine("PyFlink, processes", _flink("process", "0"), 0.02, _FLINK, "apache-flink"),
        Engine("PyFlink, processes, changelog", _flink("process", "1"), 0.02, _FLINK, "apache-flink"),
    )
}
"""By name, ours first."""
