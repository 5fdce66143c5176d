"""Files that are reloaded when they change, while the service runs. Blocking I/O on a few small files."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from storage.clock import Clock
from storage.errors import InvalidInputError

_CHECK_INTERVAL_MS = 1_000
_REST_MS = 1_000

logger = logging.getLogger("dstl_service")

_T = TypeVar("_T")
_Signature: TypeAlias = list[tuple[int, int, int]]
"""Time of the last write in ns, size in bytes and inode of each file."""


class Reread(Generic[_T]):
    """
    The parsed content of some files, checked for changes at most once a second.

    The last valid content stays in use while the files cannot be read or are being written: half of a file may be
    valid, and would admit callers or lock them out. A change counts once the files are at rest: the newest is older
    than `_REST_MS`, or nothing has changed since the check before. Refreshing is not synchronized, but harmless in two
    threads: both read the same files.

    Args:
        what: Name of the files in log lines and errors.
        paths: The files.
        read: Reads and parses them.
        clock: Tells when to check again.
        secret: Whether only the owner should be able to read the files; if others can, a warning is logged.

    Raises:
        InvalidInputError: The files cannot be read, or their content is invalid.
    """

    def __init__(
        self, what: str, paths: Sequence[Path], read: Callable[[], _T], clock: Clock, *, secret: bool = True
    ) -> None:
        self._what = what
        self._paths = paths
        self._read = read
        self._clock = clock
        self._is_secret = secret
        self._seen, self._value = self._look()
        self._changed: _Signature = []
        self._checked_ms = clock.monotonic_ms()

    @property
    def value(self) -> _T:
        """The current content."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._checked_ms >= _CHECK_INTERVAL_MS:
            self._checked_ms = now_ms
            self._refresh()
        return self._value

    def _refresh(self) -> None:
        try:
            signature = self._signature()
            if signature == self._seen:
                return
            if signature == self._changed or self._is_at_rest(signature):
                self._seen, self._value = self._look()
                logger.info("%s read again", self._what)
            self._changed = signature
        except (OSError, InvalidInputError) as error:
            logger.warning("%s cannot be read again", self._what, extra={"error": str(error)})

    def _is_at_rest(self, signature: _Signature) -> bool:
        """Whether the files were last written a while ago; a clock that is wrong only costs one more check."""
        written_ms = max(modified_ns for modified_ns, _, _ in signature) // 1_000_000
        return self._clock.now_ms() - written_ms >= _REST_MS

    def _look(self) -> tuple[_Signature, _T]:
        where = f"{self._what} {', '.join(map(str, self._paths))}"
        try:
            seen = self._signature()  # before the content, so that a change in between is detected later
            value = self._read()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError(f"{where} cannot be read: {error}") from None
        except InvalidInputError as error:
            raise InvalidInputError(f"{where}: {error}") from None
        if self._is_secret:
            warn_if_readable(self._what, self._paths)
        return seen, value

    def _signature(self) -> _Signature:
        return [(status.st_mtime_ns, status.st_size, status.st_ino) for status in map(os.stat, self._paths)]


def warn_if_readable(what: str, paths: Sequence[Path]) -> None:
    """Log a warning for each secret file that other users of the host can access."""
    for path in paths:
        mode = stat.S_IMODE(os.stat(path).st_mode)
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            facts = {"path": str(path), "mode": f"{mode:o}"}
            logger.warning("%s can be read by other users: chmod 600 keeps them out", what, extra=facts)
