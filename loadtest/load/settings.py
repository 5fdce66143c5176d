"""
Settings of a load test, from environment variables, which are those of `make load`.

Values only. The program and the locust process that it starts read the same variables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.load.key_patterns import PATTERNS
from loadtest.load.shapes import SHAPES, SOAK_S, Shape
from storage.errors import InvalidInputError
from storage.validation import KEY_GROUP_MAX
from tools.servers.faults.store_profiles import PROFILES, StoreProfile

MAX_PARALLELISM_MIN = 128
"""Minimum number of the job's key groups."""

STORAGES = ("s3", "file")

RATES = {"s3-standard": 1.0}
"""Usual checkpoints per second at stores that are too slow for `LoadSettings.rate`."""

SERVICE_PID_VARIABLE = "DSTL_LOAD_SERVICE_PID"
"""Variable with the service's process id, if the load test started it."""

STORE_VARIABLE = "DSTL_LOAD_STORE"
"""Variable with host and port of the proxy in front of the store, if there is one."""

REPORT_VARIABLE = "DSTL_LOAD_REPORT"
"""Variable with the file for the figures of a headless run, which ends by itself; unset, the web page ends the run."""


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Workload, shape, slots, rate, duration and target of a load test."""

    slots: int = 100
    """Tasks of a batch: each checkpoint has change sets of all of them."""
    hosts: int = 4
    """Simulated hosts, among which the slots are divided. Each is one of locust's users."""
    rate: float = 5.0
    """Checkpoints per second of the one job."""
    duration_s: int = 60
    """For how long new batches begin, in seconds."""
    storage: str = "s3"
    """``s3``: a VersityGW of the test's own; ``file``: a temporary folder. Unused with `service`."""
    service: str | None = None
    """Address of a running service, ``unix:///path`` or ``http://host:port``; without it, the test starts one."""
    token: str | None = None
    """Token, if the service requires one."""
    seed: int = 0
    """Seed of keys, values, sizes and faults."""
    job: str = "load"
    """Name of the job. In a permanent store, use a new one for every run."""
    workload: str = "mixed"
    """Which keys tasks change, a name of `key_patterns.PATTERNS`."""
    shape: str = "steady"
    """The rate over time, a name of `shapes.SHAPES`."""
    store: str = "local"
    """The store's profile, a name of `store_profiles.PROFILES`."""
    thresholds: Path | None = None
    """File of limits that decide the exit code, see `thresholds`."""

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= self.slots <= KEY_GROUP_MAX + 1:
            raise InvalidInputError(
                f"HOSTS and SLOTS must be 1 <= HOSTS <= SLOTS <= {KEY_GROUP_MAX + 1}, got {self.hosts}, {self.slots}"
            )
        if not (0 < self.rate < math.inf and self.duration_s > 0):
            raise InvalidInputError(f"RATE and DURATION must be positive, got {self.rate}, {self.duration_s}")
        if self.storage not in STORAGES:
            raise InvalidInputError(f"STORAGE must be one of {', '.join(STORAGES)}, got {self.storage!r}")
        for variable, name, known in (
            ("WORKLOAD", self.workload, PATTERNS),
            ("SHAPE", self.shape, SHAPES),
            ("STORE", self.store, PROFILES),
        ):
            if name not in known:
                raise InvalidInputError(f"{variable} must be one of {', '.join(known)}, got {name!r}")

    @property
    def phases(self) -> Shape:
        """The shape over this duration."""
        return SHAPES[self.shape](self.duration_s)

    @property
    def profile(self) -> StoreProfile:
        """The store's profile."""
        return PROFILES[self.store]

    @property
    def needs_proxy(self) -> bool:
        """Whether the store is behind a proxy; the store as it is needs none."""
        return self.store != "local" or self.phases.has_outage

    def require_store(self) -> None:
        """
        Refuse profiles and outages of a store that the load test does not start.

        Raises:
            InvalidInputError: The service, or its folder, has no proxy in front of its store.
        """
        if self.needs_proxy and (self.service or self.storage != "s3"):
            raise InvalidInputError(
                f"STORE={self.store} and SHAPE={self.shape} need a store of the test's own: STORAGE=s3 and no SERVICE"
            )

    @property
    def max_parallelism(self) -> int:
        """The least power of two that gives every slot a key group, and at least Flink's and Spark's usual number."""
        return max(MAX_PARALLELISM_MIN, 1 << (self.slots - 1).bit_length())

    def slots_of(self, host: int) -> int:
        """Return how many slots the host of this number has; the first ones get the remainder."""
        return self.slots // self.hosts + int(host < self.slots % self.hosts)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> LoadSettings:
        """
        Read the variables of `make load`; empty is unset. With SHORT, the defaults are those of a run of seconds.

        Raises:
            InvalidInputError: A value is invalid.
        """
        given = {name: value for name, value in environment.items() if value}
        default = cls()
        default = replace(
            default,
            rate=RATES.get(given.get("STORE", default.store), default.rate),
            duration_s=SOAK_S if given.get("SHAPE") == "soak" else default.duration_s,
        )
        if given.get("SHORT", "0") != "0":
            default = replace(default, slots=8, hosts=2, rate=min(2.0, default.rate), duration_s=8)
        thresholds = given.get("THRESHOLDS")
        try:
            return replace(
                default,
                slots=int(given.get("SLOTS", default.slots)),
                hosts=int(given.get("HOSTS", min(default.hosts, int(given.get("SLOTS", default.slots))))),
                rate=float(given.get("RATE", default.rate)),
                duration_s=int(given.get("DURATION", default.duration_s)),
                storage=given.get("STORAGE", default.storage),
                service=given.get("SERVICE"),
                token=given.get("DSTL_TOKEN"),
                seed=int(given.get("SEED", default.seed)),
                job=given.get("JOB", default.job),
                workload=given.get("WORKLOAD", default.workload),
                shape=given.get("SHAPE", default.shape),
                store=given.get("STORE", default.store),
                thresholds=Path(thresholds) if thresholds else None,
            )
        except InvalidInputError:
            raise
        except ValueError as error:
            raise InvalidInputError(
                f"SLOTS, HOSTS, DURATION and SEED must be whole numbers, RATE a number: {error}"
            ) from None
