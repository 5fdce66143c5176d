"""
The backend's settings, in a form that can be sent to tasks.

Values only; an unknown name is an error that lists the known ones.
"""

from __future__ import annotations

import difflib
import math
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from backend_client.option_checks import check_bounds, operator_changes
from storage.errors import InvalidInputError
from storage.open import did_you_mean
from storage.private_folder import Trust, make_folder
from storage.validation import KEY_GROUP_MAX, validate_name


def _default_folder() -> str:
    # By number: a user name comes from the environment and may be another user's. Not below XDG_RUNTIME_DIR, which is
    # in memory and emptied when the user logs out.
    return os.path.join(tempfile.gettempdir(), f"dstl-{os.geteuid()}")


EXACT, DEFERRED, BOUNDED_LOSS = FAILOVER_MODES = ("exact", "deferred", "bounded-loss")
KEEP, REPLAY, FORGET = LOST_ROWS = ("keep", "replay", "forget")

_TEXTS = (
    *("service", "token_file", "ca_file", "certificate_file", "local_dir", "trusted_uids", "trusted_dir"),
    *("fork_location", "sidecar_config_file"),
)
SECONDS_MAX = 10**9  # thirty years; the system's own waits take neither infinity nor much more
_NUMBERS: dict[str, tuple[int, float, bool]] = {
    # Above this, at most that, and whether it is whole.
    "patience_s": (0, SECONDS_MAX, False),
    "checkpoint_timeout_s": (0, SECONDS_MAX, False),
    "idle_timers": (0, SECONDS_MAX, False),
    "failover_patience_s": (0, SECONDS_MAX, False),
    "max_stall_s": (0, math.inf, False),
    "max_lost_fraction": (0, 1, False),
    "max_deferred_bytes": (0, math.inf, True),
    "preemptive_bytes": (0, math.inf, True),
    "batch_tries_max": (0, math.inf, True),
    "local_idle_s": (0, math.inf, True),
    "sidecar_idle_exit_s": (-1, math.inf, True),
    "link_port": (-1, 65535, True),
    "standby_replicas": (-1, 1, True),
    "standby_bytes_max": (-1, math.inf, True),
    "parallelism": (0, KEY_GROUP_MAX + 1, True),
    "max_parallelism": (0, KEY_GROUP_MAX + 1, True),
    "autoscale_batch_ms": (0, math.inf, False),
    "autoscale_min": (0, KEY_GROUP_MAX + 1, True),
}
_OPTIONAL_NUMBERS = {"idle_timers", "parallelism", "max_parallelism", "autoscale_batch_ms"}


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """Settings of one backend; the attributes without default are arguments of their own in the public API."""

    storage: str
    """Where state is kept: `file:///path` (a disk that all hosts see) or `s3://bucket/prefix`."""
    job: str
    """Names the state; a restart with the same name continues with it."""
    service: str | None = None
    """Address of the sidecar on every host: `unix:///path`, `http://host:port` or `https://host:port`; else that in the
    host's own environment (`DSTL_SERVICE`); else one is started."""
    token_file: str | None = None
    """
    File with the token of a service that asks for one, on every host; the first line counts. Else the one in the host's
    own environment (`DSTL_TOKEN_FILE`, `DSTL_TOKEN`).
    """
    ca_file: str | None = None
    """Certificates in PEM by which an `https` service is known, on every host; else those that the host's own
    environment names (`DSTL_CA_FILE`); else those of the system."""
    certificate_file: str | None = None
    """Certificate in PEM, with its key in the same file, that is shown to an `https` service in place of a token, on
    every host; else that in the host's own environment (`DSTL_CLIENT_CERTIFICATE_FILE`)."""
    local_dir: str = ""
    """Folder on every host for tables, and for the socket and log of an auto-started sidecar; else that in the host's
    own environment (`DSTL_LOCAL_DIR`); else `dstl-UID` in the temporary folder. Neither it nor a folder above it
    may be another user's or writable by others."""
    trusted_uids: str = ""
    """Users, by number or name and separated by commas, who may own folders above `local_dir` and run the sidecar,
    besides the task's own and root; else those in the host's own environment (`DSTL_TRUSTED_UIDS`)."""
    trusted_dir: str = ""
    """
    A folder that only trusted users can see, such as a volume of the pod: the owners of it and of the folders above it
    then do not matter; else that in the host's own environment (`DSTL_TRUSTED_DIR`).
    """
    local_idle_s: int = 86_400
    """After this time without being opened, tables in `local_dir` are removed, whatever their job; at least as
    long as jobs of the host pause between batches, or they restore their tables."""
    standby_replicas: int = 0
    """1: each table has a copy on a second host, normally within a few checkpoints, where its partition runs if its
    executor or host is lost; a batch's output is then kept twice, too. 0: the table is restored from the storage."""
    standby_bytes_max: int = 0
    """Limit of a job's copies on one host, in bytes; tables beyond it have no copy. 0: as many as leave a tenth of the
    disk of `local_dir` free."""
    parallelism: int | None = None
    """Partitions of an operator that names none; by default Spark's default parallelism."""
    max_parallelism: int | None = None
    """Number of key groups, 1..32768; fixed when the job is created (128 if not given). A fork has that of its parent
    if it is not given; with another one, its first start rewrites the state."""
    autoscale_batch_ms: float | None = None
    """How long a batch may take, in ms: while batches take longer, or the sources hold rows back, operators get twice
    the partitions, and half of them once batches take less than a third. By default their number stays."""
    autoscale_min: int = 1
    """Autoscaling leaves an operator at least this number of partitions."""
    autoscale_max: int | None = None
    """Autoscaling gives an operator at most this number of partitions; by default Spark's default parallelism, and
    never more than `max_parallelism`."""
    preemptive_bytes: int = 5 * 1024 * 1024
    """A task that has logged this much sends it on while rows still flow."""
    batch_tries_max: int = 4
    """How often a batch is executed before its error is reported, where executing it again can help."""
    idle_timers: float | None = None
    """Seconds after which a batch runs although no rows came, so that timers fire; by default they wait for rows.
    Cannot be switched on or off for a query that has a checkpoint."""
    failover: str = "exact"
    """How rows are treated whose table is being restored: "exact" (the batch waits), "deferred" (they wait in the log,
    the batch does not), "bounded-loss" (they are set aside, counted, and run only on request)."""
    failover_patience_s: float = 1.0
    """How long a task waits for its table in "deferred" and "bounded-loss"; in "exact", only a task that has neither
    rows nor anything due."""
    max_stall_s: float = 60.0
    """Once a partition's rows have been set aside for this long, the next batch waits for all tables."""
    max_deferred_bytes: int = 1 << 30
    """A batch waits for all tables if deferred rows of all operators together would exceed this in the log."""
    max_lost_fraction: float = 0.005
    """With "bounded-loss": the largest share of an operator's rows within a minute that may be lost."""
    lost_rows: str = "keep"
    """How a start treats rows that are lost so far: "keep" (they stay listed), "replay" (the first batch runs them,
    as of their arrival), "forget" (they are deleted)."""
    fork_of: str | None = None
    """
    A job that does not exist yet is created as a fork of this one: it begins with its state, without a copy, and the
    positions of its sources at that time; see docs/operations.md.
    """
    fork_at: int | str | None = None
    """Where it begins: a retained checkpoint (number) or a savepoint (name) of that job; by default at its newest
    checkpoint."""
    fork_location: str | None = None
    """The `checkpointLocation` of that job's query: a fork that reads files needs the record of them in that folder.
    Kafka sources do not need it."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Operators that got another name since the newest checkpoint, as pairs or `{"former": "present"}`: they keep their
    state. The setting may stay; see docs/operations.md."""
    removed: tuple[str, ...] = ()
    """Names of operators that the query no longer has and whose state is given up. The setting may
    stay."""
    patience_s: float = 60.0
    """How long a task tries to reach its sidecar."""
    checkpoint_timeout_s: float = 600.0
    """How long a checkpoint may wait for the storage."""
    links: bool = True
    """On a cluster, auto-started sidecars connect to the driver's, which listens on `spark.driver.host`, so
    that all tasks of a host share objects. Off: each task outside the driver's host stores its own."""
    link_port: int = 0
    """Port of the driver's host on which its sidecar listens for them; 0: an ephemeral one."""
    sidecar_idle_exit_s: int = 600
    """An auto-started sidecar stops after this time without a request, at the latest after twice that time."""
    sidecar_config_file: str | None = None
    """Settings file of auto-started sidecars, on every host; else that in the host's own environment
    (`DSTL_CONFIG`)."""

    def __post_init__(self) -> None:
        validate_name("job", self.job)
        if isinstance(self.storage, str) and ("@" in urlsplit(self.storage).netloc or _is_odd(self.storage)):
            raise InvalidInputError(
                "storage must not contain credentials: commands and errors show it. Give them to the sidecar in its "
                "environment, or in the files that boto3 reads"
            )
        if not _is_storage(self.storage):
            raise InvalidInputError(
                f"storage {self.storage!r} must be file:///an/absolute/path (a disk that all hosts see) or "
                f"s3://bucket/prefix{did_you_mean(str(self.storage))}"
            )
        self._take_texts()
        if self.service is not None:
            _check_address(self.service)
        if not isinstance(self.links, bool):
            raise InvalidInputError(f"links must be True or False, not {self.links!r}")
        for name, (above, at_most, whole) in _NUMBERS.items():
            if name not in _OPTIONAL_NUMBERS or getattr(self, name) is not None:
                self._check_number(name, above, at_most, whole=whole)
        if self.autoscale_max is not None:
            self._check_number("autoscale_max", self.autoscale_min - 1, KEY_GROUP_MAX + 1, whole=True)
        self._check_failover()
        if not isinstance(self.local_dir, str) or (self.local_dir and not os.path.isabs(self.local_dir)):
            raise InvalidInputError(f"local_dir must be the absolute path of a folder, not {self.local_dir!r}")
        self._check_fork()
        self._check_operators()

    @property
    def host_folder(self) -> str:
        """`local_dir` on the host of the calling process."""
        return self.local_dir or os.environ.get("DSTL_LOCAL_DIR") or _default_folder()

    @property
    def host_trust(self) -> Trust:
        """The users that the calling process trusts on its host."""
        uids = self.trusted_uids or os.environ.get("DSTL_TRUSTED_UIDS", "")
        return Trust.parse(uids, self.trusted_dir or os.environ.get("DSTL_TRUSTED_DIR", ""))

    def private_folder(self, *parts: str) -> str:
        """
        Make and return a folder within `local_dir` on the calling process's host, private to this user.

        Raises:
            UntrustedFolderError: Another user could change its content.
        """
        folder = os.path.join(self.host_folder, *parts)
        with suppress(OSError):  # a full or broken disk shows at the first write (I16)
            make_folder(folder, self.host_trust)
        return folder

    @property
    def host_service(self) -> str | None:
        """Address of the sidecar on the calling process's host, or None: it is started when needed."""
        address = self.service or os.environ.get("DSTL_SERVICE") or None
        if address is not None:
            _check_address(address)
        return address

    @property
    def host_ca_file(self) -> str | None:
        """`ca_file` on the calling process's host."""
        return self.ca_file or os.environ.get("DSTL_CA_FILE") or None

    @property
    def host_certificate(self) -> tuple[str, str | None] | None:
        """Files with certificate and key on the calling process's host, or None."""
        path = self.certificate_file or os.environ.get("DSTL_CLIENT_CERTIFICATE_FILE")
        return (path, None) if path else None

    def _take_texts(self) -> None:
        """Take paths as texts, as which settings are sent to tasks, and refuse what is neither."""
        for name in _TEXTS:
            value = getattr(self, name)
            if isinstance(value, os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
            elif value is not None and not isinstance(value, str):
                raise InvalidInputError(f"{name} must be text, not {value!r}")

    def _check_failover(self) -> None:
        if self.failover not in FAILOVER_MODES:
            raise InvalidInputError(f"failover must be one of {', '.join(FAILOVER_MODES)}, not {self.failover!r}")
        if self.lost_rows not in LOST_ROWS:
            raise InvalidInputError(f"lost_rows must be one of {', '.join(LOST_ROWS)}, not {self.lost_rows!r}")

    def _check_fork(self) -> None:
        if self.fork_of is not None and validate_name("job", self.fork_of) == self.job:
            raise InvalidInputError(f"fork_of is the job itself, {self.job!r}: give the fork another name, job=…")
        if isinstance(self.fork_at, str):
            validate_name("savepoint", self.fork_at)
        elif self.fork_at is not None:
            self._check_number("fork_at", -1, whole=True)
        if self.fork_at is not None and self.fork_of is None:
            raise InvalidInputError("fork_at says where a fork begins, but fork_of names no job")

    def _check_operators(self) -> None:
        # As tuples: settings are compared, hashed and read from JSON.
        renamed, removed = operator_changes(self.renamed, self.removed)
        former, present = {old for old, _ in renamed}, {new for _, new in renamed}
        if not len(former) == len(present) == len(renamed) or former & {*present, *removed}:
            raise InvalidInputError(
                f"renamed={dict(renamed)!r}, removed={removed!r}: each name may occur only once, so names cannot "
                "be exchanged; rename one operator with one start, and the other with the next"
            )
        object.__setattr__(self, "renamed", renamed)
        object.__setattr__(self, "removed", removed)

    def _check_number(self, name: str, above: int, at_most: float = math.inf, *, whole: bool = False) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or (whole and not isinstance(value, int)) or not above < value <= at_most:
            kind = f"whole number of at least {above + 1}" if whole else f"number above {above}"
            bound = "" if at_most == math.inf else f" and at most {at_most}"
            raise InvalidInputError(f"{name} must be a {kind}{bound}, not {value!r}")

    @classmethod
    def of(cls, storage: str, job: str, options: Mapping[str, Any]) -> BackendSettings:
        """
        Build settings from keyword options.

        Raises:
            InvalidInputError: An option is unknown or has an invalid value.
        """
        known = {field.name for field in fields(cls)} - {"storage", "job"}
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f", did you mean {near[0]!r}?" if near else "."
                raise InvalidInputError(f"unknown option {name!r}{hint} Known options: {', '.join(sorted(known))}")
        check_bounds(options)
        return cls(storage=storage, job=job, **options)


def _is_storage(url: Any) -> bool:
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme != "file":
        return parts is not None and parts.scheme == "s3" and bool(parts.netloc)
    return parts.netloc in ("", "localhost") and parts.path.startswith("/")


def _is_odd(url: str) -> bool:
    """Say whether a mistyped URL may hold credentials, which no error may show."""
    return "@" in url and not _is_storage(url)


def _check_address(address: str) -> None:
    if "@" in address and not address.startswith("unix:///"):  # first: the other error shows the address
        raise InvalidInputError("service must be an address without user and password; put the token into token_file")
    if not address.startswith(("unix:///", "http://", "https://")):
        raise InvalidInputError(f"service {address!r} must be unix:///path, http://host:port or https://host:port")
    if not address.startswith("unix:///") and not _is_host_and_port(address):
        raise InvalidInputError(f"service {address!r} must be a host and a port, without a path: http://host:port")


def _is_host_and_port(address: str) -> bool:
    try:
        parts = urlsplit(address)
        has_more = parts.path not in ("", "/") or parts.query or parts.fragment
        return bool(parts.hostname) and parts.port != 0 and not has_more
    except ValueError:  # the port is no number, or above 65535
        return False
