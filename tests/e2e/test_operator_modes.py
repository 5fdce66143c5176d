"""Time mode and output mode of an operator across restarts of its query."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from backend_client import ChangelogStateBackend
from dstl_service.formats.keys import manifest_key
from dstl_service.formats.manifest import encode_manifest
from dstl_service.registry.job_store import JobStore
from storage.clock import SystemClock, SystemIds
from storage.errors import InvalidInputError
from storage.open import open_store
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


def forget_modes(url: str) -> None:
    """Rewrite the newest checkpoint as written by programs that stored no modes."""
    store = open_store(url)
    newest = list(JobStore(store, "job", SystemClock(), SystemIds()).completed())[-1]
    assert [(info.time_mode, info.output_mode) for info in newest.operators] == [("None", "Update")]
    operators = tuple(replace(info, time_mode=None, output_mode=None) for info in newest.operators)
    store.put(manifest_key("job", newest.id, newest.generation), encode_manifest(replace(newest, operators=operators)))


def test_other_modes_are_refused_and_the_old_program_goes_on(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """
    I14: a restart with another time or output mode is an error that names both, as on Spark, and loses nothing.

    A job of a program that did not store modes continues, and from then on keeps the modes of that restart.
    """
    files, collected, backend = random_input(seed=80, batches=3, rows=40, keys=8), Collected(), make_backend()

    def run(upto: int, output_mode: str = "Update", time_mode: str = "None") -> None:
        write_input(tmp_path / "in", files[:upto])
        stream = read_input(spark, tmp_path / "in").groupBy("k")
        result = backend.transform_with_state(stream, Totals(), OUTPUT, output_mode, time_mode)
        run_to_end(result.writeStream, tmp_path / "chk", collected)

    run(1)
    forget_modes(backend.settings.storage)
    os.kill(int(Path(backend.auto_started_sidecar.pid_path).read_text()), signal.SIGKILL)
    run(2)
    with pytest.raises(InvalidInputError, match="'Totals' was started with timeMode 'None', now it has 'EventTime'"):
        run(3, "Update", "eventTime")
    with pytest.raises(InvalidInputError, match="'Totals' was started with outputMode 'Update', now it has 'Append'"):
        run(3, "append")
    run(3)

    assert collected.batches == expected_output(files)
