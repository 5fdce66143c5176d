"""
Settings of a load test, from environment variables, which are those of `make load`.

Values only. The program and the locust process that it starts read the same variables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from storage.errors import InvalidInputError
from storage.validation import KEY_GROUP_MAX

MAX_PARALLELISM_MIN = 128
"""Minimum number of the job's key groups."""

STORAGES = ("s3", "file")

SERVICE_PID_VARIABLE = "DSTL_LOAD_SERVICE_PID"
"""Variable with the service's process id, if the load test started it."""

REPORT_VARIABLE = "DSTL_LOAD_REPORT"
"""Variable with the file for the figures of a headless run, which ends by itself; unset, the web page ends the run."""


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Slots, rate, duration and target of a load test."""

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

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= self.slots <= KEY_GROUP_MAX + 1:
            raise InvalidInputError(
                f"HOSTS and SLOTS must be 1 <= HOSTS <= SLOTS <= {KEY_GROUP_MAX + 1}, got {self.hosts}, {self.slots}"
            )
        if not (0 < self.rate < math.inf and self.duration_s > 0):
            raise InvalidInputError(f"RATE and DURATION must be positive, got {self.rate}, {self.duration_s}")
        if self.storage not in STORAGES:
            raise InvalidInputError(f"STORAGE must be one of {', '.join(STORAGES)}, got {self.storage!r}")

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
        Read SLOTS, HOSTS, RATE, DURATION (seconds), STORAGE, SERVICE, SEED, JOB and DSTL_TOKEN; empty is unset.

        Raises:
            InvalidInputError: A value is invalid.
        """
        given = {name: value for name, value in environment.items() if value}
        default = cls()
        try:
            return cls(
                slots=int(given.get("SLOTS", default.slots)),
                hosts=int(given.get("HOSTS", min(default.hosts, int(given.get("SLOTS", default.slots))))),
                rate=float(given.get("RATE", default.rate)),
                duration_s=int(given.get("DURATION", default.duration_s)),
                storage=given.get("STORAGE", default.storage),
                service=given.get("SERVICE"),
                token=given.get("DSTL_TOKEN"),
                seed=int(given.get("SEED", default.seed)),
                job=given.get("JOB", default.job),
            )
        except InvalidInputError:
            raise
        except ValueError as error:
            raise InvalidInputError(
                f"SLOTS, HOSTS, DURATION and SEED must be whole numbers, RATE a number: {error}"
            ) from None
