"""
A wall clock that another process sets: simulates a wrong clock, or one that is corrected while the service runs.

The offset is in a small file that both processes map, so that reading it costs no system call. The monotonic clock is
not changed, as on a real host.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from storage.clock import SystemClock

HOUR_MS = 3_600_000
_FORMAT = struct.Struct("=q")


class ClockOffset:
    """The number of milliseconds that processes which called `install` add to their wall clock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(_FORMAT.pack(0))

    def jump_to(self, offset_ms: int) -> None:
        """Set the offset; it applies from the next reading of the clock on."""
        with self.path.open("r+b") as file:
            file.write(_FORMAT.pack(offset_ms))


def install(path: Path) -> None:
    """Add the offset of a `ClockOffset` to this process's `SystemClock`."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), _FORMAT.size, prot=mmap.PROT_READ)
    true_now_ms = SystemClock.now_ms

    def now_ms(self: SystemClock) -> int:
        (offset_ms,) = _FORMAT.unpack_from(mapped)
        return int(true_now_ms(self) + offset_ms)

    SystemClock.now_ms = now_ms  # type: ignore[method-assign]
