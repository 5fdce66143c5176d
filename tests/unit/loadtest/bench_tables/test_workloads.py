"""The workloads of `make bench-tables`: tables stay bounded and are what the changes say."""

from __future__ import annotations

import pytest

from loadtest.bench_tables.published import PARALLELISM, TABLES
from loadtest.bench_tables.workloads import SCALE, WORKLOADS


@pytest.mark.parametrize("name", WORKLOADS)
def test_tables_stay_bounded(name: str) -> None:
    """Once filled, the table hardly grows, and applying all changes gives its content."""
    workload, applied = WORKLOADS[name](200), dict[bytes, bytes]()
    parts = workload.fill()
    filled = len(workload.table)
    parts += [workload.changes() for _ in range(200)]

    for changes in parts:
        for key, value in changes.items():
            if value is None:
                del applied[key]  # nothing is deleted twice
            else:
                applied[key] = value
    assert applied == workload.table
    assert 0.8 * filled < len(workload.table) < 1.2 * filled


@pytest.mark.parametrize("name", WORKLOADS)
def test_changes_are_as_large_as_published(name: str) -> None:
    """The changes of a checkpoint, times the scale, have about the size that Flink publishes."""
    workload = WORKLOADS[name]()
    for _ in workload.fill():
        pass
    sizes = [sum(len(key) + len(value or b"") for key, value in workload.changes().items()) for _ in range(60)]

    found_mb = sum(sizes) / len(sizes) * SCALE * PARALLELISM / 1e6
    assert 0.7 < found_mb / TABLES[name].checkpointed_mb.on[0] < 1.3
