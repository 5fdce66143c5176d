"""Spark's daemon of Python workers with this package's modules: what a worker finds when it starts."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from zipfile import ZipFile

from backend_client.spark.api.recommended_settings import recommended_settings

MODULE = next(one.value for one in recommended_settings() if one.name == "spark.python.daemon.module")
_INT = struct.Struct("!i")


@contextmanager
def daemon() -> Iterator[int]:
    """Start the daemon as Spark does; yield its port, the first thing that it writes."""
    command = [sys.executable, "-m", MODULE, "pyspark.worker"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "SPARK_REUSE_WORKER": "1"}
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield _INT.unpack(process.stdout.read(4))[0]
    finally:
        process.stdin.close()  # by which it ends
        process.stdout.close()
        process.wait(30)


def test_worker_has_all_modules_when_it_starts() -> None:
    """A worker that was only just forked already has the table's library, which a task needs."""
    with daemon() as port, closing(socket.create_connection(("127.0.0.1", port), 30)) as worker:
        pid = _INT.unpack(worker.recv(4, socket.MSG_WAITALL))[0]
        assert "rocksdict" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")


def test_nothing_but_the_port_is_written() -> None:
    """The output of a module's import, and a missing module, do not disturb Spark."""
    program = f"from {MODULE} import preload; preload(['this', 'no.such.module']); print(42)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "42\n"
    assert "no.such.module is not imported before workers start" in done.stderr


def test_modules_in_zips_cost_a_worker_nothing(tmp_path: Path) -> None:
    """Nobody reads the index of a zip again when finders are to look again; other modules of it are still found."""
    with ZipFile(tmp_path / "z.zip", "w") as made:
        for name in ("first/__init__.py", "first/second/__init__.py", "first/second/third.py"):
            made.writestr(name, "")
    program = f"""
import importlib, sys, zipimport
from {MODULE} import preload
sys.path.insert(0, {str(tmp_path / "z.zip")!r})
preload(["first.second"])
print([finder for finder in sys.path_importer_cache.values() if isinstance(finder, zipimport.zipimporter)])
importlib.invalidate_caches()
import first.second.third
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_each_worker_draws_numbers_of_its_own() -> None:
    """Two workers do not inherit the state of one random generator."""
    program = f"""
import os
from {MODULE} import preload
preload(["numpy.random"])
import numpy
for _ in range(2):
    if os.fork() == 0:
        print(numpy.random.randint(1 << 60), flush=True)
        os._exit(0)
    os.wait()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second = done.stdout.split()
    assert first != second
