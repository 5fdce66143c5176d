"""
Authentication by tokens and certificates, from files that are reloaded when they change.

A token file has one token per line, each with all rights. A request may carry any of them; this service itself sends
the first one to other services. To replace a token without downtime: append the new one everywhere, then move it to the
first line, then remove the old one.

An access file, in TOML, has an entry for each token or certificate with fewer than all rights:

    tokens = [
        { name = "orders", role = "writer", jobs = ["orders", "orders.*"], sha256 = "9f86d08…" },
        { name = "monitoring", role = "reader", token = "…" },
    ]
    certificates = [
        { name = "spark-orders.example", role = "writer", jobs = ["orders"] },
    ]

A certificate's name is its common name or one of its alternative names.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dstl_service.access.reread import Reread
from dstl_service.access.rights import Identity
from dstl_service.process.logs import LogLimiter
from dstl_service.wire import parse_tokens
from storage.clock import Clock
from storage.errors import InvalidInputError

CALLER = "dstl.caller"
"""Key of the connection's `Caller` in a request's scope."""

_BEARER = b"Bearer "
_LOGGED_MAX = 300
_NOTHING = hashlib.sha256(b"").hexdigest()
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELDS = {"tokens": {"name", "role", "jobs", "token", "sha256"}, "certificates": {"name", "role", "jobs"}}

logger = logging.getLogger("dstl_service")


@dataclass(frozen=True, slots=True)
class Caller:
    """The peer of a connection: names in its verified certificate, or its user on this host."""

    certificate_names: tuple[str, ...] = ()
    user: str = ""


@dataclass(frozen=True, slots=True)
class Grants:
    """The content of an access file."""

    tokens: tuple[tuple[bytes, Identity], ...]
    """SHA-256 of each token, with its identity."""
    certificates: Mapping[str, Identity]


class Access:
    """
    Authenticates requests; if neither tokens nor an access file are set, every caller has all rights.

    Args:
        token: One token with all rights, or None.
        token_file: File with such tokens, one per line, or None.
        clock: Tells when to check the files again.
        access_file: File with tokens and certificates of fewer rights, or None.

    Raises:
        InvalidInputError: A file cannot be read, or its content is invalid.
    """

    def __init__(
        self, token: str | None, token_file: Path | None, clock: Clock, access_file: Path | None = None
    ) -> None:
        self._token = parse_tokens(token) if token is not None else []
        self._token_file = None
        if token_file is not None:
            self._token_file = Reread(
                "token file", [token_file], lambda: parse_tokens(token_file.read_text("utf-8")), clock
            )
        self._grants = None
        if access_file is not None:
            self._grants = Reread(
                "access file", [access_file], lambda: parse_grants(access_file.read_text("utf-8")), clock
            )
        self._refused = LogLimiter(clock)

    @property
    def is_asked_for(self) -> bool:
        """Say whether callers must authenticate."""
        return bool(self._token) or self._token_file is not None or self._grants is not None

    def identify(self, authorization: bytes | None, caller: Caller | None = None) -> Identity | None:
        """
        Return the identity of a request with this ``Authorization`` header; None if it is refused.

        Tokens are compared in constant time. A request with a wrong token is refused even if its certificate is known.
        """
        if not self.is_asked_for:
            return _unlimited(caller.user if caller and caller.user else "anybody")
        if authorization is None:
            return self._certified(caller)
        given = authorization.removeprefix(_BEARER) if authorization.startswith(_BEARER) else b""
        if not given:
            return None
        digest = hashlib.sha256(given).digest()
        matching = [identity for known, identity in self._known() if hmac.compare_digest(digest, known)]
        return matching[0] if matching else None

    def log_refusal(self, client: str, path: str) -> None:
        """Log a refused request; at most one line a second, as strangers must not fill the disk."""
        if requests := self._refused.count():
            facts = {"client": client, "path": path[:_LOGGED_MAX], "requests": requests}
            logger.warning("request without a valid token", extra=facts)

    def own(self) -> str | None:
        """Return the token that this service sends to other services, or None."""
        tokens = self._full()
        return tokens[0] if tokens else None

    def _full(self) -> Sequence[str]:
        return self._token if self._token_file is None else self._token_file.value

    def _known(self) -> Iterable[tuple[bytes, Identity]]:
        full = _unlimited("token")
        own = [(_digest_of(token), full) for token in self._full()]
        return [*own, *(self._grants.value.tokens if self._grants is not None else ())]

    def _certified(self, caller: Caller | None) -> Identity | None:
        if caller is None or self._grants is None:
            return None
        known = self._grants.value.certificates
        return next((known[name] for name in caller.certificate_names if name in known), None)


def parse_grants(text: str) -> Grants:
    """
    Parse an access file.

    Raises:
        InvalidInputError: The content is invalid; the message contains no token.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise InvalidInputError("the file is not valid TOML") from None  # the parser's message could hold a token
    for name, entries in document.items():
        if name not in _FIELDS or not isinstance(entries, list):
            raise InvalidInputError(f"{name!r} is not a list of tokens or certificates; the file has only these")
    if not any(document.values()):
        raise InvalidInputError("the file lists no token and no certificate, so nobody could send requests; add one")
    tokens = [(_digest(entry), _identity("tokens", entry)) for entry in document.get("tokens", [])]
    certificates = [_identity("certificates", entry) for entry in document.get("certificates", [])]
    if len({digest for digest, _ in tokens}) < len(tokens) or len({it.name for it in certificates}) < len(certificates):
        raise InvalidInputError("a token or certificate is listed twice; remove one entry")
    return Grants(tuple(tokens), {identity.name: identity for identity in certificates})


def _identity(kind: str, entry: Mapping[str, Any]) -> Identity:
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not name or not name.isprintable():
        raise InvalidInputError(f"an entry of {kind} has no printable name; add one")
    unknown = sorted(set(entry) - _FIELDS[kind])
    if unknown:
        raise InvalidInputError(f"entry {name!r} has unknown fields: {', '.join(unknown)}; remove or correct them")
    role, jobs = entry.get("role"), entry.get("jobs")
    if jobs is None and role != "writer":
        jobs = ["*"]
    if not isinstance(role, str) or not isinstance(jobs, list) or not jobs:
        raise InvalidInputError(f"entry {name!r} needs a role, and a writer needs a list of jobs")
    try:
        return Identity(name, role, tuple(jobs))  # type: ignore[arg-type]  # it checks that itself
    except InvalidInputError as error:
        raise InvalidInputError(f"{name!r}: {error}") from None


def _digest(entry: Mapping[str, Any]) -> bytes:
    token, digest = (entry.get("token"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
    if isinstance(token, str) and digest is None:
        tokens = parse_tokens(token)
        if len(tokens) > 1:
            raise InvalidInputError("an entry of tokens has several tokens; make an entry for each")
        return _digest_of(tokens[0])
    if digest == _NOTHING:
        raise InvalidInputError("a sha256 of an entry of tokens is that of no text at all; hash the token itself")
    if isinstance(digest, str) and token is None and _SHA256.fullmatch(digest):
        return bytes.fromhex(digest)
    raise InvalidInputError("each entry of tokens needs either token, or sha256 with 64 lower-case hexadecimal digits")


@lru_cache(64)
def _digest_of(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


@lru_cache(64)
def _unlimited(name: str) -> Identity:
    return Identity(name)
