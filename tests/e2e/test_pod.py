"""
The sidecar in a container of its own beside the tasks' one, as in a pod: they share a volume, and nothing else.

A failure means that a task and its sidecar need the same processes, the same ``/tmp`` or a folder that only one user
can write, of which a pod has none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from backend_client import ChangelogStateBackend
from storage.open import open_store
from tests.e2e.support import (
    OUTPUT,
    Totals,
    WhenStored,
    expected_output,
    expected_state,
    materializations,
    random_input,
    read_input,
    run_to_end,
    stored_totals,
    write_input,
)
from tests.waiting import wait_until
from tools.servers.programs import PROJECT_ROOT
from tools.servers.s3_server import S3Server

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(os.geteuid() != 0, reason="only root may make namespaces")]

FILES = random_input(seed=61, batches=5, rows=1_000, keys=300)


@pytest.fixture
def volume() -> Iterator[Path]:
    """A folder that everyone can write, like a pod's ``emptyDir``; not in ``/tmp``, of which each container has one."""
    folder = Path(tempfile.mkdtemp(prefix="dstl-pod-", dir="/var/tmp"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def container(volume: Path, storage: str, environment: Mapping[str, str], socket: Path) -> Iterator[None]:
    """Run a sidecar that sees no other process, has a ``/tmp`` of its own, and a hostname that nobody else knows."""
    inside = 'mount -t tmpfs none /tmp && hostname pod && exec "$@"'
    command = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command += ["sh", "-c", inside, "sh"]
    command += [sys.executable, "-m", "dstl_service", "serve", "--storage", storage, "--socket", str(socket)]
    with open(volume / "sidecar.log", "ab") as log:
        process = subprocess.Popen(command, env={**os.environ, **environment}, cwd="/", stdout=log, stderr=log)
    try:
        wait_until(lambda: socket.exists() or process.poll() is not None, what="the sidecar")
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.usefixtures("always_materialized")
def test_sidecar_in_a_container_of_its_own(
    spark: SparkSession, tmp_path: Path, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Change sets, snapshots and restores pass through the volume; a restarted container restores from the bucket alone.

    Without the setting that says whose volume it is, tasks refuse it.
    """
    write_input(tmp_path / "in", FILES[:3])
    local_dir = volume / "local"
    with S3Server() as server:
        server.create_bucket("state")
        storage = "s3://state/pod"
        settings = {
            **server.env(),
            "PYTHONPATH": str(PROJECT_ROOT),
            "DSTL_TRUSTED_DIR": str(volume),
            "DSTL_MATERIALIZATION_ROOT": str(local_dir),
        }
        function = WhenStored(local_dir)

        def run(socket: Path, trusted_dir: str = "") -> None:
            options: dict[str, Any] = {
                "service": f"unix://{socket}",
                "local_dir": local_dir,
                "trusted_dir": trusted_dir,
            }
            backend = ChangelogStateBackend(storage, job="job", parallelism=2, **options)
            rows = read_input(spark, tmp_path / "in").groupBy("k")
            totals = backend.transform_with_state(rows, Totals(), OUTPUT, "Update", "None")
            run_to_end(totals.writeStream, tmp_path / "checkpoint", function)

        first, second = volume / "first.sock", volume / "second.sock"
        with container(volume, storage, settings, first):
            with pytest.raises(StreamingQueryException, match="trusted_dir"):
                run(first)
            run(first, str(volume))
        shutil.rmtree(local_dir)
        write_input(tmp_path / "in", FILES)
        with container(volume, storage, settings, second):
            run(second, str(volume))

        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        assert stored_totals(storage, "job") == expected_state(FILES)
        assert materializations(storage)
        assert {info.key.split("/")[2] for info in open_store(storage).list("job/segments/")} == {"pod"}
    assert function.batches == expected_output(FILES)
