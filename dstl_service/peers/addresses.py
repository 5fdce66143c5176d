"""
Addresses of the services of a storage, so that a client cannot have the service's token sent elsewhere.

A service with an advertised URL announces it in the store, at its start and every hour; a writer of the store is
trusted with all state anyway. A coordinator calls only announced addresses, or those that its operator lists. It looks
up the one address that it was given, so stale entries cause no calls. The store keeps the `ENTRIES_MAX` entries that
were renewed last: their number is bounded, and an entry does not expire by age.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from storage.checksum import checksum64
from storage.clock import Clock
from storage.errors import DstlError, InvalidInputError, NotFoundError
from storage.object_store import ObjectStore

FOLDER = "@services"
"""Folder of announced addresses; no job can have this name."""

ENTRIES_MAX = 10_000
"""Most entries, far more than a cluster has services; the least recently renewed ones are deleted."""

_AGAIN_MS = 5_000
_RENEWED_MS = 3_600_000
_KNOWN_MS = 600_000
_KNOWN_MAX = 10_000
_PORTS = {"http": 80, "https": 443}
_IPV4 = re.compile(r"[0-9][0-9.*]*(?::[0-9*]*)?")

logger = logging.getLogger("dstl_service")


def origin_of(url: str) -> str:
    """
    Return the origin of a URL: scheme, host and port.

    Raises:
        InvalidInputError: The URL is not the address of a service.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
        parts = urlsplit("")
    if not host or parts.scheme not in _PORTS or parts.username is not None:
        shown = f"...{url[url.rindex('@') :]}" if "@" in url else url  # what is before it may be a password
        raise InvalidInputError(
            f"{shown[:200]!r} is not a service's address; the form is http://host:port or https://host:port"
        )
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{_PORTS[parts.scheme] if port is None else port}"


def parse_allowed(text: str) -> list[str]:
    """
    Return the patterns in a list of addresses, separated by commas.

    Raises:
        InvalidInputError: A pattern cannot match an address.
    """
    patterns = [pattern.strip().lower().rstrip("/") for pattern in text.split(",")]
    for pattern in patterns:
        origin_of(pattern.replace("*", "1"))
    return [pattern if "*" in pattern else origin_of(pattern) for pattern in patterns]


def matches(pattern: str, origin: str) -> bool:
    """
    Return whether an origin is one that a pattern lists.

    A ``*`` stands for any text at the beginning of a host's name, for numbers in an IPv4 address, and elsewhere for any
    text without a dot: nobody outside has a host like ``10.0.0.*`` or ``host-*``.
    """
    scheme, _, place = pattern.partition("://")
    first, *others = map(re.escape, place.split("*"))
    any_text = "[0-9.]*" if _IPV4.fullmatch(place) else "[^.]*"
    found = first + "".join((any_text if first or number else ".*") + part for number, part in enumerate(others))
    return re.fullmatch(f"{re.escape(scheme)}://{found}", origin) is not None


def encode_entry(origin: str) -> tuple[str, bytes]:
    """Return key and content of the object that announces an origin."""
    return f"{FOLDER}/{checksum64(origin.encode()):016x}.json", json.dumps({"format": 1, "url": origin}).encode()


def announce(store: ObjectStore, origin: str) -> None:
    """Announce an origin in the store, and delete the oldest entries above `ENTRIES_MAX`. Blocking."""
    store.put(*encode_entry(origin))
    entries = list(store.list(f"{FOLDER}/"))
    if len(entries) > ENTRIES_MAX:
        oldest_first = sorted(entries, key=lambda info: info.modified_ms)
        store.delete([info.key for info in oldest_first[:-ENTRIES_MAX]])


class Announcement:
    """
    The address of this service, given out once the store has it; until then tasks make their sets durable themselves.

    The announcement is renewed every hour while the address is in use.

    Args:
        url: URL for other hosts, or None.
        store: Takes the announcement.
        in_thread: Runs a blocking call.
        clock: Tells when to announce again.
    """

    def __init__(
        self, url: str | None, store: ObjectStore, in_thread: Callable[..., Awaitable[Any]], clock: Clock
    ) -> None:
        self._url = url
        self._store = store
        self._in_thread = in_thread
        self._clock = clock
        self._is_known = url is None
        self._again_ms = 0
        self._running: asyncio.Task[None] | None = None

    @property
    def url(self) -> str | None:
        """The address, once it is announced; None before. Called on the event loop."""
        if self._url is not None:
            self.begin()
        return self._url if self._is_known else None

    def begin(self) -> None:
        """Start an announcement, unless one runs, succeeded within the hour, or failed within five seconds."""
        if self._url is None or self._running is not None or self._clock.monotonic_ms() < self._again_ms:
            return
        self._running = asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        assert self._url is not None
        wait_ms = _AGAIN_MS
        try:
            await self._in_thread(announce, self._store, origin_of(self._url))
            self._is_known, wait_ms = True, _RENEWED_MS
        except DstlError as error:
            logger.warning(
                "address cannot be announced; tasks make their sets durable alone", extra={"error": str(error)}
            )
        finally:
            self._again_ms = self._clock.monotonic_ms() + wait_ms
            self._running = None


class PeerRegistry:
    """
    Decides whether an address may be called with this service's token. Owned by the event loop.

    Args:
        allowed: Addresses that the operator lists, separated by commas, see `matches`; None: announced ones.
        store: Holds the announcements.
        look: Runs a job's blocking call; bounds how many run at a time.
        clock: Tells when to look an address up again.
        needs_tls: Whether only https addresses may be called.
    """

    def __init__(
        self,
        allowed: str | None,
        store: ObjectStore,
        look: Callable[..., Awaitable[Any]],
        clock: Clock,
        *,
        needs_tls: bool,
    ) -> None:
        self._allowed = None if allowed is None else parse_allowed(allowed)
        self._needs_tls = needs_tls
        self._store = store
        self._look = look
        self._clock = clock
        self._known: OrderedDict[str, int] = OrderedDict()

    async def check(self, job: str, url: str) -> str:
        """
        Return the origin of a peer's URL if it may be called.

        Raises:
            InvalidInputError: The address is neither listed nor announced, or is not https although TLS is needed.
        """
        origin = origin_of(url)
        if self._needs_tls and not origin.startswith("https:"):
            raise InvalidInputError(
                f"{origin} would receive the token unencrypted; a service with TLS calls others over https only"
            )
        if not await self._is_peer(job, origin):
            raise InvalidInputError(
                f"{origin} is not a known service of this storage; list it in peers.allowed, or start it with this "
                f"storage and that advertised_url"
            )
        return origin

    async def _is_peer(self, job: str, origin: str) -> bool:
        if self._allowed is not None:
            return any(matches(pattern, origin) for pattern in self._allowed)
        now_ms = self._clock.monotonic_ms()
        if self._known.get(origin, now_ms) <= now_ms:
            if not await self._look(job, self._is_stored, origin):
                return False
            self._known[origin] = now_ms + _KNOWN_MS
            while len(self._known) > _KNOWN_MAX:
                self._known.popitem(last=False)
        return True

    def _is_stored(self, origin: str) -> bool:
        key, expected = encode_entry(origin)
        try:
            return self._store.get(key) == expected
        except NotFoundError:
            return False
