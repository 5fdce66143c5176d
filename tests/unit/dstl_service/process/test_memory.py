"""What the process does with freed memory."""

from __future__ import annotations

import platform
import subprocess
import sys

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


def faults(mode: str) -> int:
    """Return how many pages a process faults in that fills and frees 24 MB ten times."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep memory")
def test_freed_buffers_are_used_again() -> None:
    """Buffers of megabytes reuse memory that was freed before, so that hardly any page is faulted in again."""
    assert faults("reuse") < faults("plain") / 10
