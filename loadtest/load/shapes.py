"""Shapes of a load: its rate over time, and when the store is out. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

STEPS = 5
"""Steps of `step`, each as much higher than the one before as the first is above nothing."""

RAMP_FIRST = 0.1
"""Share of the rate at which `ramp` begins."""

OUTAGE_S_MAX = 30.0
"""Longest outage of `outage`; clients repeat a request for 60 s."""

SOAK_S = 3_600
"""Usual duration of `soak`, in seconds."""

_OUTAGE_FIRST = 0.4
_OUTAGE_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Phase:
    """
    A part of a run.

    Args:
        name: For people.
        end_s: Its end, in seconds from the run's beginning.
        first: Factor of the rate at its beginning, >= 0; it changes linearly.
        last: Factor of the rate at its end.
        is_out: Whether the store answers nothing but 503.
    """

    name: str
    end_s: float
    first: float = 1.0
    last: float = 1.0
    is_out: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """The phases of a run, at least one, in order."""

    phases: tuple[Phase, ...]

    def phase_at(self, at_s: float) -> Phase:
        """Return the phase at this time; after the end, the last one."""
        return next((phase for phase in self.phases if at_s < phase.end_s), self.phases[-1])

    def factor_at(self, at_s: float) -> float:
        """Return the factor of the rate at this time, > 0."""
        begin_s = 0.0
        for phase in self.phases:
            if at_s < phase.end_s:
                share = (at_s - begin_s) / (phase.end_s - begin_s)
                return phase.first + (phase.last - phase.first) * max(0.0, share)
            begin_s = phase.end_s
        return self.phases[-1].last

    @property
    def due_s(self) -> float:
        """For how many seconds at full rate the run asks while the store is there."""
        ends = [0.0, *(phase.end_s for phase in self.phases)]
        return sum(
            (end_s - begin_s) * (phase.first + phase.last) / 2
            for (begin_s, end_s), phase in zip(pairwise(ends), self.phases, strict=True)
            if not phase.is_out
        )

    @property
    def has_outage(self) -> bool:
        """Whether the store is out for a while."""
        return any(phase.is_out for phase in self.phases)


def _steady(duration_s: float) -> Shape:
    return Shape((Phase("steady", duration_s),))


def _ramp(duration_s: float) -> Shape:
    return Shape((Phase("ramp", duration_s, RAMP_FIRST),))


def _step(duration_s: float) -> Shape:
    shares = [number / STEPS for number in range(1, STEPS + 1)]
    return Shape(tuple(Phase(f"{share:.0%} of the rate", duration_s * share, share, share) for share in shares))


def _outage(duration_s: float) -> Shape:
    first_s = duration_s * _OUTAGE_FIRST
    end_s = first_s + min(OUTAGE_S_MAX, duration_s * _OUTAGE_SHARE)
    return Shape((Phase("before", first_s), Phase("outage", end_s, is_out=True), Phase("after", duration_s)))


SHAPES: Mapping[str, Callable[[float], Shape]] = MappingProxyType(
    {"steady": _steady, "ramp": _ramp, "step": _step, "soak": _steady, "outage": _outage}
)
"""By name: make a shape for a duration in seconds, > 0. `soak` is `steady` for `SOAK_S`, unless told otherwise."""
