"""A sink whose slots take unequally long, where Spark gives slow tasks a second attempt."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.e2e.speculation_program import FILES
from tests.sidecars import end_sidecars
from tools.servers.spark.cluster import Loopback, SparkCluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


class _Host(Loopback):
    """Spark gives no second attempt on the same host."""

    def __init__(self, number: int) -> None:
        self.address = f"127.0.0.{number + 2}"


@pytest.fixture
def local_dirs() -> Iterator[list[Path]]:
    """Local folders of three hosts, short enough for sockets; sidecars started there are stopped by their pid."""
    with tempfile.TemporaryDirectory(prefix="dstl-", ignore_cleanup_errors=True) as folder:
        found = [Path(folder) / str(number) for number in range(3)]
        yield found
        for local_dir in found:
            end_sidecars(local_dir)


def test_slow_slot_is_not_begun_again(tmp_path: Path, local_dirs: list[Path]) -> None:
    """A second attempt would fence the first one, a third one the second, and nothing would ever be published."""
    hosts = [{"DSTL_LOCAL_DIR": str(folder), "PYTHONPATH": str(Path(__file__).parents[2])} for folder in local_dirs]
    command = [sys.executable, "-m", "tests.e2e.speculation_program", "--folder", str(tmp_path), "--master"]
    with SparkCluster(tmp_path, hosts[1:], machines=[Loopback(), _Host(0), _Host(1)], cores=2) as cluster:
        environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, **hosts[0]}
        subprocess.run([*command, cluster.master_url], cwd=tmp_path, env=environment, check=True, timeout=240)
    with closing(sqlite3.connect(tmp_path / "out.db")) as connection:
        opened = connection.execute("select slot, opened from slots order by slot").fetchall()
    assert [slot for slot, _ in opened] == [0, 1]
    # A lost executor may have it opened once more; second attempts would open it twice for each checkpoint.
    assert all(len(FILES) <= count < 2 * len(FILES) for _, count in opened), opened
