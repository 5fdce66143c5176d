"""Files that are reloaded when they change, while the service runs. Blocking I/O on a few small files."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from storage.clock import Clock
from storage.errors import InvalidInputError

_CHECK_INTERVAL_MS = 1_000

logger = logging.getLogger("dstl_service")

_T = TypeVar("_T")


class Reread(Generic[_T]):
    """
    The parsed content of some files, checked for changes at most once a second.

    The last valid content stays in use while the files cannot be read: a file that is being replaced must neither admit
    nor lock out every caller. Refreshing is not synchronized, but harmless in two threads: both read the same files.

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
            if self._signature() != self._seen:
                self._seen, self._value = self._look()
                logger.info("%s read again", self._what)
        except (OSError, InvalidInputError) as error:
            logger.warning("%s cannot be read again", self._what, extra={"error": str(error)})

    def _look(self) -> tuple[object, _T]:
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

    def _signature(self) -> object:
        return [(status.st_mtime_ns, status.st_size, status.st_ino) for status in map(os.stat, self._paths)]


def warn_if_readable(what: str, paths: Sequence[Path]) -> None:
    """Log a warning for each secret file that other users of the host can access."""
    for path in paths:
        mode = stat.S_IMODE(os.stat(path).st_mode)
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            facts = {"path": str(path), "mode": f"{mode:o}"}
            logger.warning("%s can be read by other users: chmod 600 keeps them out", what, extra=facts)
