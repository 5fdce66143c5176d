"""
In-memory fallback when the local disk fails: full, read-only, broken (I16).

The task then restores its partition into a folder in memory, or else in the temporary folder, and deletes it at its
end. That is slow, and the next batch must repeat it, but neither the batch nor its checkpoint fails.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from backend_client.table.local_disk import LocalDiskError
from backend_client.table.state_table import StateTable
from storage.private_folder import open_lock

_MEMORY = "/dev/shm"  # noqa: S108 - a private folder is made in it
_PREFIX = "dstl-table-"


class MemoryTable(StateTable):
    """A table whose files are removed when it is closed."""

    @classmethod
    def make(cls) -> MemoryTable:
        """
        Open an empty table.

        Raises:
            UnavailableError: This folder cannot be made either.
        """
        place = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else tempfile.gettempdir()
        _remove_left_behind(Path(place))
        try:
            folder = tempfile.mkdtemp(prefix=_PREFIX, dir=place)
        except OSError as error:
            raise LocalDiskError(
                f"no folder in memory can be made for a table: {error}; free memory, or repair the local disk"
            ) from error
        return cls.open(folder)

    def close(self) -> None:
        """Close the table and remove its files."""
        super().close()
        shutil.rmtree(self._folder.parent, ignore_errors=True)


def _remove_left_behind(place: Path) -> None:
    """
    Remove this user's spare tables whose process was killed; one in use holds its slot's lock.

    Any user may write to this place, so a folder counts only if it is not a link, is this user's, and has a lock file.
    """
    for folder in place.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            lock = open_lock(folder / "0.lock", 0)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
