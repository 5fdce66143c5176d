"""The evaluation of a query's outputs: gaps by partition, missing and wrong rows."""

from __future__ import annotations

import json

import pytest

from loadtest.bench_recovery.observed import Observed, missing_rows, wrong_rows


def observed(*outputs: tuple[float, int, list[tuple[int, int, int]]]) -> Observed:
    """Return what a driver's lines say: for each output its time, batch, and rows of key, number and partition."""
    seen = Observed()
    for at_s, batch, rows in outputs:
        named = [[*row, f"host-{row[2]}"] for row in rows]
        seen.take(json.dumps({"kind": "output", "at_s": at_s, "batch": batch, "rows": named}))
    return seen


def test_gap_is_the_partitions_own() -> None:
    """A partition without output in a batch has the longer gap; the trigger is not part of it."""
    seen = observed((10.0, 0, [(1, 1, 0), (2, 1, 1)]), (12.0, 1, [(1, 2, 0)]), (14.5, 2, [(1, 3, 0), (2, 2, 1)]))

    assert seen.gap_s({0}, 2.0, 10.0, 20.0) == pytest.approx(0.5)
    assert seen.gap_s({0, 1}, 2.0, 10.0, 20.0) == pytest.approx(2.5)
    assert seen.gap_s({0}, 2.0, 13.0, 14.0) is None
    assert seen.host_of(12.0) == {0: "host-0", 1: "host-1"}


def test_rows_are_counted_in_bins() -> None:
    """Each bin has the rows of the outputs within it."""
    seen = observed((1.0, 0, [(1, 1, 0)]), (1.25, 1, [(1, 2, 0), (2, 1, 1)]))
    assert [rows for _, rows in seen.rows_per_bin(0.95, 1.35)] == [1, 0, 0, 2]


def test_batch_that_ran_again_counts_once() -> None:
    """Rows of the last run of a batch count; a number left out and a number twice are wrong, a lost row is missing."""
    again = observed((1.0, 0, [(1, 1, 0), (2, 1, 0)]), (2.0, 0, [(1, 1, 0), (2, 1, 0)]), (3.0, 1, [(1, 2, 0)]))
    counts: dict[int, int] = {}

    assert wrong_rows(again.outputs, counts) == 0
    assert counts == {1: 2, 2: 1}
    assert missing_rows(again.outputs, rows_per_batch=2) == 1
    assert wrong_rows(observed((4.0, 2, [(1, 4, 0)])).outputs, counts) == 1
    assert wrong_rows(observed((4.0, 2, [(2, 1, 0)])).outputs, {2: 1}) == 1
