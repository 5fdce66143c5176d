"""How tests end sidecars and followers that were auto-started: by their process ids, and never another process."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from tests.waiting import wait_until


def sidecars_of(folder: Path) -> list[int]:
    """
    Return the process ids of the sidecars that live in a folder now.

    Ids are given again: one that an old file holds may be that of any process by now, so its command line counts.
    """
    found = []
    for file in sorted(folder.rglob("service-*.pid")):
        with suppress(OSError, ValueError):  # it is being written, or the process is gone
            pid = int(file.read_text(encoding="utf-8"))
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"dstl_service" in words and os.fsencode(file.with_suffix(".sock")) in words:
                found.append(pid)
    return found


def followers_of(folder: Path) -> list[int]:
    """Return the process ids of the followers that keep copies of tables in a folder now."""
    found = []
    for file in sorted(folder.rglob("standby/*/pid")):
        with suppress(OSError, ValueError):
            pid = int(file.read_text(encoding="utf-8"))
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"standby" in words and os.fsencode(file.parent) in words:
                found.append(pid)
    return found


def end_sidecars(folder: Path, how: signal.Signals = signal.SIGKILL) -> None:
    """End the sidecars and followers of a folder, and wait until they do nothing any more: it may be removed."""
    pids = [*sidecars_of(folder), *followers_of(folder)]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, how)
    for pid in pids:
        wait_until(lambda: _has_ended(pid), what=f"the end of sidecar {pid}")  # noqa: B023


def _has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"  # where nobody reaps orphans, one stays as a zombie
