"""`make stack` as used by a user: started, used through the command that it prints, stopped with Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from pyspark.sql.types import LongType, StructType

from backend_client.state.codec import ValueCodec
from storage.open import open_store
from tests.e2e.support import stored_state
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
BATCHES = 2


class RunningStack:
    """The program in its own process group, and its output so far."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tools.servers"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def is_ready(self) -> bool:
        assert self.process.poll() is None, "".join(self.lines)
        return any("Ctrl-C" in line for line in self.lines)

    def stop(self) -> None:
        """Press Ctrl-C, and end any remaining processes of the group."""
        os.killpg(self.process.pid, signal.SIGINT)
        try:
            self.process.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self._reader.join(60)

    def is_gone(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            self.lines.extend(output)


def test_job_runs_on_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """I14: the printed job runs on both workers over S3, its state is correct, and Ctrl-C leaves no process."""
    stack = RunningStack()
    try:
        wait_until(stack.is_ready, timeout_s=300, what="the stack")
        command = next(line for line in stack.lines if "examples.cluster_totals" in line).strip()
        variables = Path(command.split(" ")[1]).read_text(encoding="utf-8")
        job = subprocess.run(
            ["/bin/sh", "-c", f"{command.removesuffix(')')} --batches {BATCHES})"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert job.returncode == 0, job.stdout + job.stderr
        assert job.stdout.count("100 customers") == BATCHES

        for line in variables.splitlines():
            name, _, value = line.removeprefix("export ").partition("=")
            monkeypatch.setenv(name, value.strip("'"))
        store = open_store("s3://state/dstl")
        codec = ValueCodec(StructType().add("orders", LongType()).json(), "totals")
        state = stored_state(store, "cluster-totals", "Totals")
        assert Counter(codec.decode(value) for value in state.values()) == {(20 * BATCHES,): 100}
        hosts = {info.key.split("/")[2] for info in store.list("cluster-totals/segments/")}
        # The coordinator cannot reach their sidecars, so the notes of checkpoints are separate objects.
        assert hosts == {"coordinator", "worker-1", "worker-2"}
        store.close()
    finally:
        stack.stop()
    wait_until(stack.is_gone, what="the end of all processes")
