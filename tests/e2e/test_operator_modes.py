"""Time mode and output mode of an operator across restarts of its query."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from backend_client import ChangelogStateBackend
from storage.errors import InvalidInputError
from tests.e2e.support import (
    OUTPUT,
    Collected,
    Totals,
    expected_output,
    random_input,
    read_input,
    run_to_end,
    write_input,
)

pytestmark = pytest.mark.e2e


def test_other_modes_are_refused_and_the_old_program_goes_on(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """
    I14: a restart with another time or output mode is an error that names both, as on Spark, and loses nothing.

    The old program goes on, also after its sidecar was killed.
    """
    files, collected, backend = random_input(seed=80, batches=3, rows=40, keys=8), Collected(), make_backend()

    def run(upto: int, output_mode: str = "Update", time_mode: str = "None") -> None:
        write_input(tmp_path / "in", files[:upto])
        stream = read_input(spark, tmp_path / "in").groupBy("k")
        result = backend.transform_with_state(stream, Totals(), OUTPUT, output_mode, time_mode)
        run_to_end(result.writeStream, tmp_path / "chk", collected)

    run(1)
    os.kill(int(Path(backend.auto_started_sidecar.pid_path).read_text()), signal.SIGKILL)
    run(2)
    with pytest.raises(InvalidInputError, match="'Totals' was started with timeMode 'None', now it has 'EventTime'"):
        run(3, "Update", "eventTime")
    with pytest.raises(InvalidInputError, match="'Totals' was started with outputMode 'Update', now it has 'Append'"):
        run(3, "append")
    run(3)

    assert collected.batches == expected_output(files)
