"""
Who asks: tokens and certificates, from files that are read again when they change.

A token file has a token a line, each with all rights. A request may carry any of them, and this service itself sends
the first one to others. So a token is exchanged without a pause: add the new one below everywhere, then put it first,
then take the old one out.

An access file, in TOML, has a line for each token or certificate that has less than all rights:

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
"""Where a request's scope has the `Caller`, if its connection tells of one."""

_BEARER = b"Bearer "
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELDS = {"tokens": {"name", "role", "jobs", "token", "sha256"}, "certificates": {"name", "role", "jobs"}}

logger = logging.getLogger("dstl_service")


@dataclass(frozen=True, slots=True)
class Caller:
    """What a connection tells of who is at its other end: names of a certificate, or a user of this host."""

    certificate_names: tuple[str, ...] = ()
    user: str = ""


@dataclass(frozen=True, slots=True)
class Grants:
    """What an access file says."""

    tokens: tuple[tuple[bytes, Identity], ...]
    """SHA-256 of each token."""
    certificates: Mapping[str, Identity]


class Access:
    """
    Whom a request is let in as; where neither tokens nor certificates are set, everybody has all rights.

    Args:
        token: One token with all rights, or None.
        token_file: File with such tokens, one a line, or None.
        clock: Tells when to look at files again.
        access_file: File with tokens and certificates of fewer rights, or None.

    Raises:
        InvalidInputError: A file cannot be read, or makes no sense.
    """

    def __init__(
        self, token: str | None, token_file: Path | None, clock: Clock, access_file: Path | None = None
    ) -> None:
        self._token = parse_tokens(token) if token is not None else []
        self._token_file = None
        if token_file is not None:
            self._token_file = Reread("token file", [token_file], lambda: parse_tokens(_text(token_file)), clock)
        self._grants = None
        if access_file is not None:
            self._grants = Reread("access file", [access_file], lambda: parse_grants(_text(access_file)), clock)
        self._refused = LogLimiter(clock)

    @property
    def is_asked_for(self) -> bool:
        """Say whether anything is asked of those who come."""
        return bool(self._token) or self._token_file is not None or self._grants is not None

    def identify(self, authorization: bytes | None, caller: Caller | None = None) -> Identity | None:
        """
        Return who a request with this ``Authorization`` header comes from, None if it is not let in.

        All wrong tokens take the same time. A wrong token is not made good by a certificate.
        """
        if not self.is_asked_for:
            return _unlimited(caller.user if caller and caller.user else "anybody")
        if authorization is None:
            return self._certified(caller)
        given = authorization.removeprefix(_BEARER) if authorization.startswith(_BEARER) else b""
        digest = hashlib.sha256(given).digest()
        matching = [identity for known, identity in self._known() if hmac.compare_digest(digest, known)]
        return matching[0] if matching else None

    def log_refusal(self, client: str, path: str) -> None:
        """Write a line about who was not let in; at most one a second, for strangers must not fill the disk."""
        if requests := self._refused.count():
            facts = {"client": client, "path": path, "requests": requests}
            logger.warning("request without a valid token", extra=facts)

    def own(self) -> str | None:
        """Return the token that this service shows to others, or None."""
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
    Read an access file.

    Raises:
        InvalidInputError: It says something else than what such a file says; no token is part of the message.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise InvalidInputError("it is no TOML") from None  # the parser's message could hold a token
    for name, entries in document.items():
        if name not in _FIELDS or not isinstance(entries, list):
            raise InvalidInputError(f"{name!r} is neither a list of tokens nor one of certificates")
    tokens = [(_digest(entry), _identity("tokens", entry)) for entry in document.get("tokens", [])]
    certificates = [_identity("certificates", entry) for entry in document.get("certificates", [])]
    if len({digest for digest, _ in tokens}) < len(tokens) or len({it.name for it in certificates}) < len(certificates):
        raise InvalidInputError("a token or certificate is there twice")
    return Grants(tuple(tokens), {identity.name: identity for identity in certificates})


def _identity(kind: str, entry: Mapping[str, Any]) -> Identity:
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not name or not name.isprintable():
        raise InvalidInputError(f"one of the {kind} has no name")
    unknown = sorted(set(entry) - _FIELDS[kind])
    if unknown:
        raise InvalidInputError(f"{name!r} has {', '.join(unknown)}, which mean nothing there")
    role, jobs = entry.get("role"), entry.get("jobs")
    if jobs is None and role != "writer":
        jobs = ["*"]
    if not isinstance(role, str) or not isinstance(jobs, list) or not jobs:
        raise InvalidInputError(f"{name!r} needs a role and, as a writer, a list of jobs")
    try:
        return Identity(name, role, tuple(jobs))  # type: ignore[arg-type]  # it checks that itself
    except InvalidInputError as error:
        raise InvalidInputError(f"{name!r}: {error}") from None


def _digest(entry: Mapping[str, Any]) -> bytes:
    token, digest = (entry.get("token"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
    if isinstance(token, str) and digest is None:
        return _digest_of(parse_tokens(token)[0])
    if isinstance(digest, str) and token is None and _SHA256.fullmatch(digest):
        return bytes.fromhex(digest)
    raise InvalidInputError("each of the tokens needs either a token or its sha256 in 64 hexadecimal digits")


@lru_cache(64)
def _digest_of(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


@lru_cache(64)
def _unlimited(name: str) -> Identity:
    return Identity(name)


def _text(path: Path) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()
