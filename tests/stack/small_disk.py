"""A disk that fills up: a small file system in memory, mounted for a test. Needs the right to mount."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a file system of this size at `folder`, which is made; unmount it at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={size_bytes},mode=0700,uid={os.getuid()}"
    sudo = [] if os.getuid() == 0 else ["sudo", "-n"]
    subprocess.run([*sudo, "mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*sudo, "umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no room on the file system of a folder."""
    with open(folder / "filler", "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
