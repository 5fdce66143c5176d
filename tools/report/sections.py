"""The sections of the report, and which targets are in each. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.reporting.target import TARGETS


@dataclass(frozen=True, slots=True)
class Section:
    """A section: its title, what one sees in it, and the targets that fill it."""

    title: str
    text: str
    targets: tuple[str, ...]


_SECTIONS = (
    Section(
        "Latency",
        "How long checkpoints take over time, materializations marked, and how long the slowest ones take.",
        ("bench-tables", "bench-tails", "load"),
    ),
    Section(
        "Objects, space and money",
        "What a checkpoint costs in objects and bytes, how large the storage gets, and how that grows with hosts.",
        ("bench-service", "bench-scale", "bench-requests"),
    ),
    Section(
        "Recovery, starts and rescaling",
        "How long output stops when an executor is killed, how long a driver takes to start, and what a switch costs.",
        ("bench-recovery", "bench-restart", "bench-rescale"),
    ),
    Section("Long runs", "What grows in thousands of batches, and what does not.", ("soak",)),
    Section("Speed by size of the state", "Rows per second from small to large state.", ("bench-growth",)),
    Section(
        "Against Spark's own operators and sinks",
        "The same work over the same rows on both sides.",
        ("bench", "bench-native", "bench-smoke", "bench-sinks"),
    ),
    Section("Against what else one could use", "The same job in other engines.", ("bench-peers",)),
    Section(
        "Correctness",
        "Kills, attacks and comparisons, and their findings.",
        ("chaos", "chaos-service", "chaos-sinks", "chaos-blocks", "attack", "differential", "mutants", "test-versions"),
    ),
)


def sections(targets: Sequence[str] = TARGETS) -> list[Section]:
    """Return the sections with those of `targets` that exist; the last one has those that are in no other."""
    known = {target for section in _SECTIONS for target in section.targets}
    found = [
        Section(section.title, section.text, tuple(target for target in section.targets if target in targets))
        for section in _SECTIONS
    ]
    others = Section(
        "Others", "Demos, and targets without a section of their own.", tuple(t for t in targets if t not in known)
    )
    return [section for section in [*found, others] if section.targets]
