"""
The service's settings: frozen values with units in their names, in groups, checked against each other once at start.

A setting is one field with a default and a docstring, either of `ServiceSettings` or of a group's dataclass, which may
be declared beside the code that it configures (`BatchSettings`). A group is one field of `ServiceSettings`. The names
of a setting in the settings file, in the environment and on the command line, and its place on docs/settings.md, follow
from the declaration: see `dstl_service.settings_sources`. Components (store, clock) are not settings and are passed to
constructors.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from dstl_service.access.certificates import TlsSettings
from dstl_service.collection.background_work import BackgroundWorkSettings
from dstl_service.collection.garbage_collector import ORPHAN_AGE_MIN_MS
from dstl_service.collection.retention import RetentionSettings
from dstl_service.collection.tombstones import DELAY_S
from dstl_service.compaction.plan import CompactionSettings
from dstl_service.intake.change_sets import BatchSettings
from dstl_service.intake.intake import IntakeSettings
from dstl_service.materialization.policy import MaterializationSettings
from dstl_service.peers.addresses import origin_of, parse_allowed
from dstl_service.process.stop_time import STORED_BY
from dstl_service.uploads.settings import UploadSettings
from dstl_service.uploads.uploader import slots_in_all
from dstl_service.wire import JSON_BYTES_MAX, URL_PATTERN
from storage.errors import InvalidInputError
from storage.private_folder import Trust
from storage.validation import validate_name

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
"""Loopback names of this host."""


def default_host_id() -> str:
    """Return this host's name, with characters replaced that object keys do not allow."""
    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in socket.gethostname())
    return name.strip(".-")[:100] or "host"


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Copies of stored data on this host: recent segments in memory, downloads on disk."""

    bytes_max: int = 100 * 1024 * 1024
    """Memory for recent segments, from which tables advance; bytes in flight are deducted from it."""
    folder: Path | None = None
    """Folder for downloads, which are in its subfolder `dstl-downloads-UID`. By default the system's temporary folder,
    and none for storage of `file` URLs."""
    disk_bytes_max: int = 1024 * 1024 * 1024
    """Disk space for downloads, which restoring tables share; 0 keeps none."""
    idle_s: int = 600
    """A download that was not read for this time is removed."""
    parts_ahead: int = 16
    """Parts of restores, up to 4 MB each, that are read from the storage before their tables need them, or four times
    as many of up to 1 MB; 0 reads none ahead."""

    def __post_init__(self) -> None:
        check_at_least(0, self, "bytes_max", "disk_bytes_max", "parts_ahead")
        check_at_least(1, self, "idle_s")


@dataclass(frozen=True, slots=True)
class GcSettings:
    """Deletion of orphans."""

    interval_s: int = 600
    """Interval at which a coordinator deletes orphans of its jobs; 0 never."""
    age_min_s: int = ORPHAN_AGE_MIN_MS // 1000
    """Minimum age at which an object that no checkpoint names is considered. It only saves requests; objects that an
    unfinished checkpoint may name are kept at any age."""

    def __post_init__(self) -> None:
        check_at_least(0, self, "interval_s", "age_min_s")


@dataclass(frozen=True, slots=True)
class DeletionSettings:
    """Deletion of whole jobs."""

    delay_s: int = DELAY_S
    """How long `dstl delete` can be undone; then any coordinator of the storage, or `dstl gc`, deletes the objects."""

    def __post_init__(self) -> None:
        check_at_least(0, self, "delay_s")


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Limits for clients: connections, time, and memory for incomplete requests."""

    connections_max: int = 4096
    """Connections at the same time; at most half of the files that the process may open. Idle connections, and ones
    with an incomplete handshake or request head, are evicted for new ones. The requests of one job take at most
    half."""
    idle_timeout_s: int = 600
    """How long a connection may be idle between requests. Clients keep connections: one per batch would cost more."""
    head_timeout_s: int = 20
    """Longest time for the head of a request, for the first one since the connection was made, and for a TLS
    handshake."""
    body_grace_s: int = 20
    """Time during which a body may arrive slowly."""
    body_bytes_per_s_min: int = 4096
    """Slowest rate of a body: at least this many bytes must have arrived for each second after `body_grace_s`."""
    bodies_bytes_max: int = 128 * 1024 * 1024
    """Memory for incomplete JSON bodies; one job takes at most as much as stays free. More is refused with
    back-pressure."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "connections_max", "idle_timeout_s", "head_timeout_s", "body_grace_s")
        check_at_least(0, self, "body_bytes_per_s_min")
        check_at_least(2 * JSON_BYTES_MAX, self, "bodies_bytes_max")


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """Calls to the services of other hosts."""

    allowed: str | None = None
    """Addresses that this service may call with its token: separated by commas, `*` for any text without a dot, at the
    beginning of a name for any text, as in `https://*.spark.example:7071`, and in `http://10.0.*:7071` for numbers. By
    default those that services have announced in the storage."""
    timeout_s: int = 30
    """How long an answer may take beyond the time that uploads may take; then the sets of that service count as
    lost."""
    calls_max: int = 128
    """Calls that run at the same time; one job uses at most half of them."""
    calls_per_host_max: int = 8
    """Calls to one address that run at the same time; one job uses at most half of them."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "timeout_s", "calls_max", "calls_per_host_max")
        if self.allowed is not None:
            parse_allowed(self.allowed)


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Access to a bucket. Credentials are not settings: boto3's default chain finds them."""

    endpoint_url: str | None = None
    """Server to use instead of AWS; by default that of `AWS_ENDPOINT_URL_S3`, if set."""
    region: str | None = None
    """Region of the bucket; by default boto3's (`AWS_REGION`, profile)."""
    addressing_style: Literal["path", "virtual", "auto"] | None = None
    """Position of the bucket's name in URLs; by default in the path if an endpoint is set."""
    ca_file: Path | None = None
    """CA certificates in PEM that verify the endpoint; by default botocore's (`AWS_CA_BUNDLE`)."""
    sse: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    """Server-side encryption of all objects; by default the bucket's."""
    sse_kms_key_id: str | None = None
    """Key of `aws:kms`; by default the account's own."""
    sse_customer_key_file: Path | None = None
    """File with a key of 32 bytes in base64, with which the server encrypts and which it never stores (SSE-C). If the
    key is lost, the state is lost."""
    connections_max: int = 0
    """Size of the connection pool; 0: one connection for every thread that may use it."""
    connect_timeout_ms: int = 5_000
    """Longest wait for a connection."""
    read_timeout_ms: int = 15_000
    """Longest silence of the server; bounds how long a hung call holds its thread."""

    def __post_init__(self) -> None:
        check_at_least(0, self, "connections_max")
        check_at_least(1, self, "connect_timeout_ms", "read_timeout_ms")


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """All settings of a service process."""

    storage: str
    """Where state is kept: `file:///path` (a local disk or mounted DFS) or `s3://bucket/prefix`."""
    socket_path: Path | None = None
    """Unix socket to listen on; its mode is 0600, and other users must not be able to write the folders above it."""
    trusted_uids: str = ""
    """Users, by number or name and separated by commas, whose processes may call over the Unix socket and who may own
    folders above it, besides the service's own and root. With them the socket's mode is 0666."""
    trusted_dir: str = ""
    """A folder that only trusted users can see, such as a volume of the pod: the owners of it and of the folders above
    it are not checked."""
    host: str = "127.0.0.1"
    """TCP address, used without `socket_path`. Any address other than loopback needs a token."""
    port: int = 0
    """TCP port; 0 lets the system choose."""
    token_file: Path | None = None
    """File with tokens of all rights, one per line; requests must carry a token as `Authorization: Bearer`. The first
    is sent to other services. It is reloaded when it changes."""
    token: str | None = field(default=None, repr=False)
    """The token itself, for environments that keep secrets; other users could see it on a command line."""
    access_file: Path | None = None
    """File in TOML with tokens and certificates that have fewer rights: a role, and the jobs for which it holds. It is
    reloaded when it changes."""
    allowed_hosts: str = ""
    """Further names, separated by commas, that the `Host` header may have on TCP without a token, besides `host`, that
    of `advertised_url`, and loopback. With a token, any name is accepted."""
    advertised_url: str | None = None
    """URL under which other hosts reach this service; without it, each task outside the coordinator's host persists its
    own change sets, in objects of its own."""
    host_id: str = field(default_factory=default_host_id)
    """Name of this host in object keys; by default derived from the host's name."""
    io_threads: int = 24
    """Threads for manifests and compactions; one job uses at most half of them."""
    checkpoint_timeout_s: int = 600
    """Longest time of a checkpoint; all attempts of an upload together must be shorter."""
    idle_exit_s: int = 0
    """Stop after this time without requests and background work, at the latest after twice that time; 0 never. An
    auto-started sidecar ends this way."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level of logged records; DEBUG logs every upload."""
    log_file: Path | None = None
    """File for log lines and standard error; by default both go to standard error. An auto-started sidecar has one. The
    file is rotated when it is full, and the last three full ones are kept beside it."""
    log_file_bytes_max: int = 16 << 20
    """Size at which a log file is full."""
    shutdown_timeout_s: int = 10
    """Longest time of a stop: uploads of held change sets, and answers to waiting requests."""
    batch: BatchSettings = field(default_factory=BatchSettings)
    upload: UploadSettings = field(default_factory=UploadSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    materialization: MaterializationSettings = field(default_factory=MaterializationSettings)
    compaction: CompactionSettings = field(default_factory=CompactionSettings)
    retention: RetentionSettings = field(default_factory=RetentionSettings)
    gc: GcSettings = field(default_factory=GcSettings)
    deletion: DeletionSettings = field(default_factory=DeletionSettings)
    tls: TlsSettings = field(default_factory=TlsSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    peers: PeerSettings = field(default_factory=PeerSettings)
    s3: S3Settings = field(default_factory=S3Settings)

    def __post_init__(self) -> None:
        validate_name("host", self.host_id)
        check_at_least(1, self, "io_threads", "checkpoint_timeout_s", "log_file_bytes_max")
        check_at_least(0, self, "port", "idle_exit_s", "shutdown_timeout_s")
        longest_upload_ms = self.upload.timeout_ms * self.upload.attempts_max
        if longest_upload_ms >= self.checkpoint_timeout_s * 1000:
            raise InvalidInputError(
                f"upload.timeout_ms x upload.attempts_max ({longest_upload_ms} ms) must stay below the checkpoint "
                f"timeout, checkpoint_timeout_s ({self.checkpoint_timeout_s} s)"
            )
        if self.advertised_url is not None and not re.fullmatch(URL_PATTERN, self.advertised_url):
            raise InvalidInputError("advertised_url must be http://host:port or https://host:port, without a user name")
        if self.advertised_url is not None:
            origin_of(self.advertised_url)
        self._check_access()
        Trust.parse(self.trusted_uids, self.trusted_dir)

    def _check_access(self) -> None:
        if self.token is not None and self.token_file is not None:
            raise InvalidInputError("both token and token_file are set; give one of them")
        if self.socket_path is not None:
            if self.advertised_url is not None:
                raise InvalidInputError(
                    "advertised_url is for TCP, but with socket_path the service does not listen on TCP; unset one of "
                    "them"
                )
            if self.tls.certificate_file is not None:
                raise InvalidInputError("tls is for TCP; unset socket_path or tls.certificate_file")
        elif self.host not in LOOPBACK and not self.asks_who:
            raise InvalidInputError(
                f"listening on {self.host} lets other hosts in; set a token with --token-file, or use a Unix socket"
            )

    @property
    def asks_who(self) -> bool:
        """Say whether requests must authenticate."""
        return not (self.token is None and self.token_file is None and self.access_file is None)

    @property
    def known_hosts(self) -> frozenset[str] | None:
        """Accepted host names; None: any, as web pages cannot reach a Unix socket and have no token."""
        if self.socket_path is not None or self.asks_who:
            return None
        named = {name.strip().lower() for name in self.allowed_hosts.split(",") if name.strip()}
        advertised = urlsplit(self.advertised_url).hostname if self.advertised_url else None
        return LOOPBACK | named | {self.host.lower()} | ({advertised} if advertised else set())

    @property
    def trust(self) -> Trust:
        """The users that the service trusts on its host."""
        return Trust.parse(self.trusted_uids, self.trusted_dir)

    @property
    def peer_timeout_s(self) -> float:
        """Longest time for the answer of another host's service, in seconds."""
        uploads_s = self.upload.timeout_ms * self.upload.attempts_max / 1000
        return min(float(self.checkpoint_timeout_s), uploads_s + self.peers.timeout_s)

    @property
    def intake(self) -> IntakeSettings:
        """Bounds of the intake, derived from other settings."""
        return IntakeSettings(
            self.batch.in_flight_bytes_max,
            self.shutdown_timeout_s * STORED_BY,
            self.upload.delay_after_error_ms,
        )

    @property
    def background_work(self) -> BackgroundWorkSettings:
        """Settings of the background work of jobs, derived from other settings."""
        return BackgroundWorkSettings(self.compaction, self.retention, self.gc.interval_s, self.gc.age_min_s * 1000)

    @property
    def keeps_downloads(self) -> bool:
        """Say whether downloads are kept on disk: for S3, or if a folder is set; a `file` store may be a local disk."""
        return self.cache.folder is not None or self.storage.startswith("s3:")

    def store_options(self) -> dict[str, Any]:
        """Return the arguments of `storage.open.open_store` besides the URL; empty for stores other than S3."""
        if not self.storage.startswith("s3:"):
            return {}
        given = {item.name: getattr(self.s3, item.name) for item in fields(self.s3)}
        threads = slots_in_all(self.upload.threads) * self.upload.attempts_max + self.io_threads
        threads += 4 * self.cache.parts_ahead  # as many as `ReadAhead` starts
        return {
            **{name: value for name, value in given.items() if value is not None},
            "connections_max": self.s3.connections_max or threads,
        }


def check_at_least(least: int, settings: object, *names: str) -> None:
    """
    Check numbers of a settings object.

    Raises:
        InvalidInputError: A number is smaller than `least`; the message names it.
    """
    for name in names:
        if getattr(settings, name) < least:
            raise InvalidInputError(f"{name} must be at least {least}, it is {getattr(settings, name)}")
