"""A job whose state is on a real S3 server."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from backend_client import ChangelogStateBackend
from storage.open import open_store
from tests.e2e.support import (
    OUTPUT,
    Collected,
    Totals,
    expected_output,
    expected_state,
    random_input,
    read_input,
    run_to_end,
    stored_totals,
    write_input,
)
from tools.servers.s3_server import S3Server

pytestmark = pytest.mark.e2e


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return a bucket on the test's own server; its address is in the environment, as on a user's machine."""
    with S3Server() as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        server.create_bucket("state")
        yield "s3://state/checkpoints"


def test_chain_on_s3_survives_sidecar_and_disk(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path, bucket: str
) -> None:
    """I14, I16: two operators on S3 need at most three objects per checkpoint, and restart from the bucket alone."""
    files = random_input(seed=40, batches=4, rows=200, keys=30)
    collected = Collected()
    for upto in (3, 4):
        write_input(tmp_path / "in", files[:upto])
        backend = make_backend(storage=bucket, parallelism=8)
        first = backend.transform_with_state(
            read_input(spark, tmp_path / "in").groupBy("k"), Totals(), OUTPUT, "Update", "None", name="first"
        )
        second = backend.transform_with_state(
            first.withColumn("v", first["s"]).groupBy("k"), Totals(), OUTPUT, "Update", "None", name="second"
        )
        run_to_end(second.writeStream, tmp_path / "chk", collected)
        os.kill(int(Path(backend.auto_started_sidecar.pid_path).read_text()), signal.SIGKILL)
        shutil.rmtree(Path(backend.settings.local_dir) / "tables")

    between = [[(k, s) for k, _, s in rows] for rows in expected_output(files).values()]
    assert collected.batches == expected_output(between)
    store = open_store(bucket)
    assert stored_totals(store, "job", "first") == expected_state(files)
    kinds = Counter(info.key.split("/")[1] for info in store.list("job/"))
    fences = 2
    assert kinds["segments"] + kinds["checkpoints"] - fences <= 3 * len(files)
    store.close()
