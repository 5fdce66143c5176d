"""The cells of the tables of durations: a way of checkpointing, on a layout, with the sizes of a recording."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from statistics import mean
from types import MappingProxyType
from typing import Literal

from dstl_service.uploads.settings import UploadSettings
from loadtest.bench_tables.published import TABLES
from loadtest.bench_tables.recording import Recording
from loadtest.bench_tables.simulation import Layout, own_files, plain_ms, shared_objects, uploaded_ms
from loadtest.bench_tables.workloads import SCALE
from tools.servers.faults.store_profiles import PROFILES

STORE = "s3-standard"
_SEED = 158

Way = Literal["on", "off", "off, hedged"]
WAYS: Mapping[Way, str] = MappingProxyType(
    {
        "on": "changelog on",
        "off": "changelog off, as Flink's users have it: one attempt per file",
        "off, hedged": "changelog off, with our uploader's early second attempts",
    }
)
"""Ways of checkpointing."""

# A file of gigabytes takes its time: an attempt is repeated early, by the running p90, but never for being late.
_HEDGED_FILES = UploadSettings(attempts_max=1, timeout_ms=600_000, threads=24)


@dataclass(frozen=True, slots=True)
class Cell:
    """
    One cell.

    Args:
        recording: What one subtask uploads.
        layout: Where subtasks are.
        way: How they checkpoint.
        on_factor: By which recorded change sets are multiplied.
        off_factor: By which recorded files are multiplied.
        checkpoints: How many are made.
    """

    recording: Recording
    layout: Layout
    way: Way
    on_factor: float
    off_factor: float
    checkpoints: int

    def objects_of(self, chance: Random) -> list[float]:
        """Draw what one subtask uploads for a checkpoint."""
        if self.way == "on":
            return [chance.choice(self.recording.on) * self.on_factor]
        return [size * self.off_factor for size in chance.choice(self.recording.off)]

    def durations_ms(self) -> list[float]:
        """Return how long the checkpoints take."""
        chance, profile = Random(_SEED), PROFILES[STORE]
        if self.way == "on":
            objects = shared_objects(self.objects_of, self.layout, chance)
            return uploaded_ms(profile, objects, self.checkpoints, UploadSettings(), _SEED)
        objects = own_files(self.objects_of, self.layout, chance)
        if self.way == "off":
            return plain_ms(profile, objects, self.checkpoints, _SEED)
        return uploaded_ms(profile, objects, self.checkpoints, _HEDGED_FILES, _SEED)

    def sizes_mb(self) -> list[float]:
        """Return the bytes of checkpoints of all subtasks, in MB."""
        chance = Random(_SEED)
        subtasks = range(self.layout.parallelism)
        return [sum(sum(self.objects_of(chance)) for _ in subtasks) / 1e6 for _ in range(self.checkpoints)]


def measured_ratio(recording: Recording) -> float:
    """Return the mean bytes of a checkpoint without the changelog, as a multiple of those of one with it."""
    return mean(sum(files) for files in recording.off) / mean(recording.on)


def off_factor(recording: Recording, workload: str) -> float:
    """Return by how much recorded files are multiplied, so that the ratio to the change sets is the published one."""
    return SCALE * TABLES[workload].checkpointed_mb.ratio(0) / measured_ratio(recording)
