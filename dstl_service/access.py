"""
Who may ask: the tokens of this service, from its settings or from a file that is read again when it changes.

A token file has a token a line. A request may carry any of them, and this service itself sends the first one to others.
So a token is exchanged without a pause: add the new one below everywhere, then put it first, then take the old one out.
"""

from __future__ import annotations

import hmac
import logging
import os
from pathlib import Path

from dstl_service.logs import Throttle
from dstl_service.wire import parse_tokens
from storage.clock import Clock
from storage.errors import InvalidInputError

_CHECK_INTERVAL_MS = 1_000

logger = logging.getLogger("dstl_service")


class Tokens:
    """
    The tokens that let a request in; without any, all are let in.

    Not thread-safe to refresh, but harmless if two do: both read the same file.

    Args:
        token: One token, or None.
        path: File with tokens, one a line, or None.
        clock: Tells when to look at the file again.

    Raises:
        InvalidInputError: There is a file, and it cannot be read or holds no token.
    """

    def __init__(self, token: str | None, path: Path | None, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._seen: object = None
        self._tokens: list[str] = parse_tokens(token) if token is not None else []
        self._expected = _headers(self._tokens)
        if path is not None:
            self._read(path)
        self._checked_ms = clock.monotonic_ms()
        self._refused = Throttle(clock)

    def accept(self, authorization: bytes | None) -> bool:
        """Tell whether a request with this ``Authorization`` header is let in; all wrong ones take the same time."""
        self._refresh()
        if not self._expected:
            return True
        matches = [hmac.compare_digest(authorization or b"", expected) for expected in self._expected]
        return any(matches)

    def log_refusal(self, client: str, path: str) -> None:
        """Write a line about who was not let in; at most one a second, for strangers must not fill the disk."""
        if requests := self._refused.count():
            facts = {"client": client, "path": path, "requests": requests}
            logger.warning("request without a valid token", extra=facts)

    def own(self) -> str | None:
        """Return the token that this service shows to others, or None."""
        self._refresh()
        return self._tokens[0] if self._tokens else None

    def _refresh(self) -> None:
        if self._path is None:
            return
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._checked_ms < _CHECK_INTERVAL_MS:
            return
        self._checked_ms = now_ms
        try:
            if _signature(self._path) != self._seen:
                self._read(self._path)
        except (OSError, InvalidInputError) as error:
            # The old tokens stay: a file that is being exchanged must not let everybody in, nor lock everybody out.
            logger.warning("token file cannot be read again", extra={"error": str(error)})

    def _read(self, path: Path) -> None:
        try:
            self._seen = _signature(path)
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError(f"token file {path} cannot be read: {error}") from None
        try:
            tokens = parse_tokens(text)
        except InvalidInputError as error:
            raise InvalidInputError(f"token file {path}: {error}") from None
        if self._tokens:
            logger.info("token file read again", extra={"tokens": len(tokens)})
        self._tokens, self._expected = tokens, _headers(tokens)


def _headers(tokens: list[str]) -> list[bytes]:
    return [f"Bearer {token}".encode("ascii") for token in tokens]


def _signature(path: Path) -> object:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size, status.st_ino
