"""
The service's settings: frozen values with units in their names, in groups, checked against each other once at start.

A setting is one field with a default and a docstring: of `ServiceSettings`, or of a group's dataclass, which may live
beside what it steers (`BatchSettings`). A group is one field of `ServiceSettings`. Its names in the settings file, in
the environment and on the command line, and its place on docs/settings.md, follow from that: see
`dstl_service.settings_sources`. Components (store, clock) are not settings and are passed to constructors.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

from dstl_service.change_sets import BatchSettings
from dstl_service.garbage_collector import ORPHAN_AGE_MIN_MS
from dstl_service.log_compaction import CompactionSettings
from dstl_service.retention import RetentionSettings
from storage.errors import InvalidInputError
from storage.model import validate_name
from storage.retry_policy import RetryPolicy


def default_host_id() -> str:
    """Return this host's name in the form that object keys allow."""
    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in socket.gethostname())
    return name.strip(".-")[:100] or "host"


@dataclass(frozen=True, slots=True)
class UploadSettings(RetryPolicy):
    """How batches reach the store: attempts that may overlap (I6), and how many uploads run."""

    threads: int = 5
    """Uploads that run at the same time."""

    def __post_init__(self) -> None:
        RetryPolicy.__post_init__(self)  # `super()` does not know a class with slots
        check_at_least(1, self, "threads")


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Recent segments in memory."""

    bytes_max: int = 256 * 1024 * 1024
    """Memory for recent segments, from which tables advance."""

    def __post_init__(self) -> None:
        check_at_least(0, self, "bytes_max")


@dataclass(frozen=True, slots=True)
class GcSettings:
    """Deletion of orphans."""

    interval_s: int = 600
    """How often a coordinator deletes orphans of its jobs; 0 never."""
    age_min_s: int = ORPHAN_AGE_MIN_MS // 1000
    """An object that no checkpoint names is deleted after this time; must exceed `checkpoint_timeout_s`."""

    def __post_init__(self) -> None:
        check_at_least(0, self, "interval_s")


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """All that a service process can be told."""

    storage: str
    """Where state is kept: `file:///path` (a local disk or mounted DFS) or `s3://bucket/prefix`."""
    socket_path: Path | None = None
    """Unix socket to listen on; its mode is 0600."""
    host: str = "127.0.0.1"
    """TCP address, used when no socket is given. Another address than loopback needs a token."""
    port: int = 0
    """TCP port; 0 lets the system choose."""
    token_file: Path | None = None
    """File with the token that every request must carry as `Authorization: Bearer`."""
    advertised_url: str | None = None
    """URL under which other hosts reach this service; without it, their tasks make their sets durable alone."""
    host_id: str = field(default_factory=default_host_id)
    """Names this host in object keys; by default from the host's name."""
    io_threads: int = 16
    """Threads for manifests and restores."""
    checkpoint_timeout_s: int = 600
    """The longest that a checkpoint may take; uploads must have given up, and orphans must be older, by then."""
    idle_exit_s: int = 0
    """Stop after this time without a request; 0 never. An embedded sidecar uses it to go away with its job."""
    shutdown_timeout_s: int = 10
    """How long a stop may take in all: uploads of what the service holds, and answers to those who wait."""
    batch: BatchSettings = field(default_factory=BatchSettings)
    upload: UploadSettings = field(default_factory=UploadSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    compaction: CompactionSettings = field(default_factory=CompactionSettings)
    retention: RetentionSettings = field(default_factory=RetentionSettings)
    gc: GcSettings = field(default_factory=GcSettings)

    def __post_init__(self) -> None:
        validate_name("host", self.host_id)
        check_at_least(1, self, "io_threads", "checkpoint_timeout_s")
        check_at_least(0, self, "port", "idle_exit_s", "shutdown_timeout_s")
        longest_upload_ms = self.upload.timeout_ms * self.upload.attempts_max
        if longest_upload_ms >= self.checkpoint_timeout_s * 1000:
            raise InvalidInputError(
                f"upload.timeout_ms x upload.attempts_max ({longest_upload_ms} ms) must stay below the checkpoint "
                f"timeout, checkpoint_timeout_s ({self.checkpoint_timeout_s} s)"
            )
        if self.gc.age_min_s <= self.checkpoint_timeout_s:
            raise InvalidInputError(
                f"gc.age_min_s ({self.gc.age_min_s}) must exceed checkpoint_timeout_s ({self.checkpoint_timeout_s}): "
                "an unfinished checkpoint may still come to name an object"
            )
        if self.socket_path is None and self.host not in ("127.0.0.1", "::1", "localhost") and not self.token_file:
            raise InvalidInputError(
                f"listening on {self.host} lets other hosts in: give a token with --token-file, or use a Unix socket"
            )

    def token(self) -> str | None:
        """
        Read the token.

        Raises:
            InvalidInputError: The file cannot be read or is empty.
        """
        if self.token_file is None:
            return None
        try:
            with open(self.token_file, encoding="utf-8") as file:
                token = file.read().strip()
        except OSError as error:
            raise InvalidInputError(f"token file {self.token_file} cannot be read: {error}") from error
        if not token:
            raise InvalidInputError(f"token file {self.token_file} is empty")
        return token


def check_at_least(least: int, settings: object, *names: str) -> None:
    """
    Check numbers of a settings object.

    Raises:
        InvalidInputError: One of them is smaller; the message names it.
    """
    for name in names:
        if getattr(settings, name) < least:
            raise InvalidInputError(f"{name} must be at least {least}, it is {getattr(settings, name)}")
