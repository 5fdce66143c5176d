"""Log records as JSON, one document per line, with the event's fields (job, checkpoint_id, epoch, …)."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from storage.clock import Clock
from storage.errors import InvalidInputError

_STDERR = 2
_FILES_KEPT = 3
_KINDS_MAX = 1_000
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON document; the entries of ``extra`` become its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's JSON line."""
        document: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "event": record.getMessage(),
        }
        document.update({name: value for name, value in vars(record).items() if name not in _STANDARD})
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


class LogLimiter:
    """
    Allows one log line per interval, for events that may occur thousands of times.

    Args:
        clock: Tells when the interval is over.
        interval_ms: Time after a line without another one.
    """

    def __init__(self, clock: Clock, interval_ms: int = 1_000) -> None:
        self._clock = clock
        self._interval_ms = interval_ms
        self._again_ms = clock.monotonic_ms()
        self._count = 0

    def count(self) -> int:
        """Count an event; return how many events the line now due stands for, or 0 if none is due."""
        self._count += 1
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._again_ms:
            return 0
        counted, self._count, self._again_ms = self._count, 0, now_ms + self._interval_ms
        return counted


def log_limiters(clock: Clock) -> Callable[..., LogLimiter]:
    """Return what gives each kind of event a limiter; that of the least recent kind goes when there are too many."""
    return lru_cache(_KINDS_MAX)(lambda *_kind: LogLimiter(clock))


class RotatingLog(RotatingFileHandler):
    """
    A log file that is rotated when full; the last three full ones are kept beside it.

    Standard error is redirected to the current file: output of crashes and libraries must not be lost, nor keep a
    rotated file open.
    """

    def _open(self) -> TextIOWrapper:
        stream = super()._open()
        os.dup2(stream.fileno(), _STDERR)
        return stream


def configure_logging(level: str = "INFO", file: Path | None = None, file_bytes_max: int = 0) -> None:
    """
    Write log records from `level` on as JSON lines to standard error, or to a file rotated at `file_bytes_max`.

    Raises:
        InvalidInputError: The file cannot be written.
    """
    try:
        handler: logging.Handler = logging.StreamHandler()
        if file is not None:
            handler = RotatingLog(file, maxBytes=file_bytes_max, backupCount=_FILES_KEPT, encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(
            f"log_file {file} cannot be written: {error.strerror}; check the path and its permissions"
        ) from error
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler])
    # Detailed records of these libraries may hold credentials and bodies.
    for name in ("boto3", "botocore", "urllib3", "s3transfer"):
        logging.getLogger(name).setLevel(logging.WARNING)
