"""The process's use of freed memory."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource, sys
from dstl_service.process.memory import reuse_freed_memory
if sys.argv[1] == "reuse":
    reuse_freed_memory()
for round in range(11):
    buffers = [bytes(range(256)) * 4096 for _ in range(24)]
    del buffers
    if round == 0:
        first = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - first)
"""


THREADS = """
import ctypes, sys, threading
from pathlib import Path
from dstl_service.process.memory import reuse_freed_memory
if sys.argv[1] == "reuse":
    reuse_freed_memory()
together = threading.Barrier(32)
def hold():
    together.wait()
    buffers = [bytes(200_000) for _ in range(20)]
    together.wait()
threads = [threading.Thread(target=hold) for _ in range(32)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
print(Path(sys.argv[2]).read_text().count("<heap nr="))
"""


def faults(mode: str) -> int:
    """Return how many pages a process faults in that fills and frees 24 MB ten times."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep memory")
def test_freed_buffers_are_used_again() -> None:
    """Buffers of megabytes reuse memory that was freed before, so that hardly any page is faulted in again."""
    assert faults("reuse") < faults("plain") / 10


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has arenas")
def test_threads_share_few_arenas(tmp_path: Path) -> None:
    """Freed memory is kept by a few arenas, not by one for each of dozens of threads."""

    def arenas(mode: str) -> int:
        command = [sys.executable, "-c", THREADS, mode, str(tmp_path / "info")]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert arenas("reuse") <= 4 < arenas("plain")
