"""
The service's settings: frozen values with units in their names, checked against each other once at start.

Each setting can come from the environment as ``DSTL_<NAME>`` (for example ``DSTL_UPLOAD_TIMEOUT_MS``); what the command
line gives wins. Components (store, clock) are not settings and are passed to constructors.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dstl_service.change_sets import BatchSettings
from dstl_service.garbage_collector import ORPHAN_AGE_MIN_MS
from dstl_service.log_compaction import CompactionSettings
from dstl_service.retention import RetentionSettings
from storage.errors import InvalidInputError
from storage.model import validate_name
from storage.retry_policy import RetryPolicy

CHECKPOINT_TIMEOUT_MS = 600_000


def default_host_id() -> str:
    """Return this host's name in the form that object keys allow."""
    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in socket.gethostname())
    return name.strip(".-")[:100] or "host"


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """All that a service process can be told."""

    storage: str
    """Where state is kept: ``file:///path`` (a local disk or mounted DFS) or ``s3://bucket/prefix``."""
    socket_path: str | None = None
    """Unix socket to listen on; its mode is 0600."""
    host: str = "127.0.0.1"
    """TCP address, used when no socket is given. Another address than loopback needs a token."""
    port: int = 0
    """TCP port; 0 lets the system choose."""
    token_file: str | None = None
    """File with the token that every request must carry as ``Authorization: Bearer``."""
    advertised_url: str | None = None
    """URL under which other hosts reach this service; without it, their tasks make their sets durable alone."""
    host_id: str = field(default_factory=default_host_id)
    """Names this host in object keys."""
    batch: BatchSettings = field(default_factory=BatchSettings)
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    compaction: CompactionSettings = field(default_factory=CompactionSettings)
    retention: RetentionSettings = field(default_factory=RetentionSettings)
    upload_threads: int = 5
    """Uploads that run at the same time."""
    io_threads: int = 16
    """Threads for manifests and restores."""
    cache_bytes_max: int = 256 * 1024 * 1024
    """Memory for recent segments, from which tables advance."""
    idle_exit_s: int = 0
    """Stop after this time without a request; 0 never. An embedded sidecar uses it to go away with its job."""
    gc_interval_s: int = 600
    """How often a coordinator deletes orphans of its jobs; 0 never."""
    gc_age_min_s: int = ORPHAN_AGE_MIN_MS // 1000
    """An object that no checkpoint names is deleted after this time; must exceed the checkpoint timeout."""
    shutdown_timeout_s: int = 10
    """How long a stopping service tries to upload what it holds."""

    def __post_init__(self) -> None:
        validate_name("host", self.host_id)
        if self.retry.timeout_ms * self.retry.attempts_max >= CHECKPOINT_TIMEOUT_MS:
            raise InvalidInputError(
                f"upload timeout_ms x attempts_max ({self.retry.timeout_ms * self.retry.attempts_max}) must stay below "
                f"the checkpoint timeout ({CHECKPOINT_TIMEOUT_MS})"
            )
        if self.socket_path is None and self.host not in ("127.0.0.1", "::1", "localhost") and not self.token_file:
            raise InvalidInputError(
                f"listening on {self.host} lets other hosts in: give a token with --token-file, or use a Unix socket"
            )
        for name in ("upload_threads", "io_threads"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} must be at least 1")
        if self.gc_age_min_s * 1000 <= CHECKPOINT_TIMEOUT_MS:
            raise InvalidInputError(
                f"gc_age_min_s ({self.gc_age_min_s}) must exceed the checkpoint timeout "
                f"({CHECKPOINT_TIMEOUT_MS // 1000} s): an unfinished checkpoint may still come to name an object"
            )
        for name in ("cache_bytes_max", "idle_exit_s", "shutdown_timeout_s", "gc_interval_s"):
            if getattr(self, name) < 0:
                raise InvalidInputError(f"{name} must not be negative")

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


_NUMBERS = {
    "DSTL_BATCH_DELAY_MS": ("batch", "delay_ms"),
    "DSTL_BATCH_SIZE_BYTES": ("batch", "size_bytes"),
    "DSTL_IN_FLIGHT_BYTES_MAX": ("batch", "in_flight_bytes_max"),
    "DSTL_UPLOAD_TIMEOUT_MS": ("retry", "timeout_ms"),
    "DSTL_UPLOAD_ATTEMPTS_MAX": ("retry", "attempts_max"),
    "DSTL_UPLOAD_DELAY_AFTER_ERROR_MS": ("retry", "delay_after_error_ms"),
    "DSTL_UPLOAD_THREADS": ("", "upload_threads"),
    "DSTL_IO_THREADS": ("", "io_threads"),
    "DSTL_CACHE_BYTES_MAX": ("", "cache_bytes_max"),
    "DSTL_GC_INTERVAL_S": ("", "gc_interval_s"),
    "DSTL_GC_AGE_MIN_S": ("", "gc_age_min_s"),
    "DSTL_SHUTDOWN_TIMEOUT_S": ("", "shutdown_timeout_s"),
}


def with_environment(settings: ServiceSettings, environment: Mapping[str, str] | None = None) -> ServiceSettings:
    """
    Return the settings with what the environment says.

    Raises:
        InvalidInputError: A variable is no whole number, or the values do not fit each other.
    """
    environment = os.environ if environment is None else environment
    changes: dict[str, dict[str, int]] = {"": {}, "batch": {}, "retry": {}}
    for variable, (group, name) in _NUMBERS.items():
        text = environment.get(variable)
        if text is None:
            continue
        try:
            changes[group][name] = int(text)
        except ValueError:
            raise InvalidInputError(f"{variable} must be a whole number, it is {text!r}") from None
    return replace(
        settings,
        batch=replace(settings.batch, **changes["batch"]),
        retry=replace(settings.retry, **changes["retry"]),
        **changes[""],  # type: ignore[arg-type]  # all of these are whole numbers
    )
