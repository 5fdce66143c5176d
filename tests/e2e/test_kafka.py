"""A job from Kafka to Kafka, on a real broker, with Spark's own connector."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path

import pytest

from dstl_service.registry.job_store import JobStore
from dstl_service.wire import source_offsets
from storage.clock import SystemClock, SystemIds
from storage.open import open_store
from tests.e2e.kafka_program import GROUP, PARTITIONS
from tests.e2e.support import expected_state, random_input, stored_totals
from tests.support.kafka_reader import committed_offsets, committed_values
from tools.servers.kafka import KafkaBroker, connector_jars

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]


def run_program(
    broker: KafkaBroker, folder: Path, local_dir: Path, rows: list[tuple[str | None, float]], *more: str
) -> int:
    """Run a process that sends rows and runs the job; return its result."""
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    command = [sys.executable, "-m", "tests.e2e.kafka_program", "--servers", broker.servers]
    command += ["--jars", ",".join(map(str, connector_jars())), "--folder", str(folder)]
    command += ["--local-dir", str(local_dir), "--produce", str(folder / "rows.json"), *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
    return subprocess.run(command, check=False, cwd=folder, timeout=480, env=environment).returncode


def offsets_of_newest_checkpoint(folder: Path) -> dict[tuple[str, int], int]:
    """Return what the newest manifest says of the topic's partitions."""
    jobs = JobStore(open_store(f"file://{folder / 'store'}"), "job", SystemClock(), SystemIds())
    (topics,) = source_offsets(list(jobs.completed())[-1].offsets) or []
    return {(topic, int(number)): offset for topic, found in topics.items() for number, offset in found.items()}


def test_job_from_topic_to_topic_is_killed_and_goes_on(tmp_path: Path, local_dir: Path) -> None:
    """
    I14: each output row is in its topic, and only rows of the interrupted batch are there twice.

    The driver dies when the second batch is in Kafka and its checkpoint is not: a new driver executes it again, from
    the same offsets and the same state. A row has the number of values of its key so far, and their sum.

    A fork of the job then reads what comes after, and no row again, and publishes just that.

    The offsets of the consumer group are always those of a checkpoint: of the last one whose driver lived long enough.
    """
    *files, later = random_input(seed=70, batches=3, rows=120, keys=20)
    (tmp_path / "later.json").write_text(json.dumps(later), encoding="utf-8")
    fork = ["--fork", str(tmp_path / "later.json")]
    with KafkaBroker() as broker:
        assert run_program(broker, tmp_path, local_dir, files[0], "--die-in-batch", "1") == -signal.SIGKILL
        lagging = committed_offsets(broker.servers, GROUP)
        assert lagging == offsets_of_newest_checkpoint(tmp_path)
        assert 0 < sum(lagging.values()) < 120  # it lags
        ended = run_program(broker, tmp_path, local_dir, files[1], *fork)
        if ended == 1 and version("pyspark").startswith("4.1."):  # its Kafka source fails after a batch it repeats
            ended = run_program(broker, tmp_path, local_dir, [], *fork)
        assert ended == 0
        assert committed_offsets(broker.servers, GROUP) == offsets_of_newest_checkpoint(tmp_path)
        assert sum(committed_offsets(broker.servers, GROUP).values()) == 240
        found = [committed_values(broker.servers, "forked", partition=number) for number in range(PARTITIONS)]
        published = [json.loads(value) for values in found for value in values]

    possible: dict[str | None, list[tuple[int, float]]] = defaultdict(list)
    for key, value in [row for rows in files for row in rows]:
        n, s = possible[key][-1] if possible[key] else (0, 0.0)
        possible[key].append((n + 1, s + value))
    seen = [tuple(row) for row in json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))]
    times = Counter((k, (n, s)) for key, k, n, s in seen if key == k)
    assert len(seen) == times.total()
    assert all(row in possible[key] for key, row in times)
    assert all((key, rows[-1]) in times for key, rows in possible.items())
    repeated = [key for (key, _), count in times.items() if count > 1]
    assert set(times.values()) == {1, 2}
    assert len(repeated) == len(set(repeated)) > 10
    store = f"file://{tmp_path / 'store'}"
    assert stored_totals(store, "job") == expected_state(files)
    assert stored_totals(store, "fork") == expected_state([*files, later])
    assert len({(row.get("k"), row["n"]) for row in published}) == len(published)
    assert all(row["n"] > possible[row.get("k")][-1][0] for row in published)
    assert {row.get("k") for row in published} == {key for key, _ in later}
