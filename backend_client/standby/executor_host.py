"""
Which host an executor's Python worker is on, by the name that Spark's driver knows.

Spark tells its workers in Python nothing of it. The executor, from which they descend, has it on its command line, on
every cluster manager.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_OPTION = b"--hostname"
_ANCESTORS_MAX = 5


@cache
def executor_host() -> str | None:
    """Return the host's name or address; None if this process does not descend from an executor, or /proc is hidden."""
    pid = os.getpid()
    try:
        for _ in range(_ANCESTORS_MAX):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if (found := host_in(words)) is not None:
                return found
            pid = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return None


def host_in(words: list[bytes]) -> str | None:
    """Return the host that an executor's command line names; None if it is that of another program."""
    if not any(b"ExecutorBackend" in word for word in words) or _OPTION not in words[:-1]:
        return None
    return words[words.index(_OPTION) + 1].decode(errors="replace") or None
