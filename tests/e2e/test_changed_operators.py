"""
Operators of a job get other names, go and come back at restarts.

A failure means that an operator lost its state, found another one's, or that no rewind to before the change works.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from backend_client import ChangelogStateBackend
from dstl_service.cli import main
from storage.errors import InvalidInputError
from tests.e2e.support import (
    OUTPUT,
    Collected,
    Totals,
    expected_state,
    read_input,
    run_to_end,
    stored_totals,
    write_input,
)

pytestmark = pytest.mark.e2e

FILES = [[("a", 1.0), ("b", 2.0)], [("a", 10.0)], [("b", 20.0), ("c", 5.0)], [("a", 100.0)]]
CHANGES: dict[str, Any] = {"renamed": {"counts": "totals"}, "removed": ["sums"]}


def test_operators_are_renamed_removed_and_added(
    spark: SparkSession,
    make_backend: Callable[..., ChangelogStateBackend],
    tmp_path: Path,
    local_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """
    I14: a renamed operator goes on with its state and its tables on disk, also with another parallelism.

    A removed one that comes back begins with an empty state, although a host still has its tables. After a rewind to
    before all that, the program of then goes on. Without the settings, nothing happens.
    """
    storage, collected = f"file://{tmp_path / 'store'}", Collected()

    def run(upto: int, *names: str, **options: Any) -> list[tuple[Any, ...]]:
        """Run totals per key, and after them, with a second name, totals of their sums; return the last output."""
        write_input(tmp_path / "in", FILES[:upto])
        backend = make_backend(**options)
        stream: Any = read_input(spark, tmp_path / "in")
        result: Any = None
        for name in names:
            result = backend.transform_with_state(stream.groupBy("k"), Totals(), OUTPUT, "Update", "None", name=name)
            stream = result.selectExpr("k", "s as v")
        run_to_end(result.writeStream, tmp_path / "chk", collected)
        return collected.batches[max(collected.batches)]

    def tables(operator: str) -> int:
        """Return the number of an operator's tables on disk."""
        return len([*local_dir.glob(f"tables/*/{operator}/*")])

    run(2, "counts", "sums")
    assert (tables("counts"), tables("sums")) == (2, 2)
    with pytest.raises(InvalidInputError, match=r"renamed=\{'counts': 'totals'\}; .*removed=\('counts', 'sums'\)"):
        run(2, "totals")

    assert run(3, "totals", parallelism=3, **CHANGES) == [("b", 2, 22.0), ("c", 1, 5.0)]
    assert stored_totals(storage, "job", "counts") == expected_state(FILES[:3])
    assert (tables("totals"), tables("counts")) == (0, 5)
    with pytest.raises(InvalidInputError, match="the query has this operator"):
        run(4, "totals", "sums", **CHANGES)
    assert run(4, "totals", "sums", renamed={"counts": "totals"}) == [("a", 1, 111.0)]
    assert stored_totals(storage, "job", "sums.2") == [(1, 111.0)]
    capsys.readouterr()
    assert main(["checkpoints", "--storage", storage, "job"]) == 0
    assert "renamed counts->totals sums.2->sums  removed sums" in capsys.readouterr().out
    assert main(["fsck", "--storage", storage, "job"]) == 0

    assert main(["rewind", "--storage", storage, "--checkpoint", "1", "--write", "job"]) == 0
    collected.batches.clear()
    assert run(4, "counts", "sums") == [("a", 3, 123.0), ("b", 2, 24.0), ("c", 1, 5.0)]
