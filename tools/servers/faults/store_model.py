"""
The fate of each request at a store of a profile, drawn by a seed. No I/O and no clock: times are arguments.

The fault proxy's script runs this in mitmproxy's environment: this module needs only Python's own library.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias

from tools.servers.faults.store_profiles import SMALL_BYTES_MAX, StoreProfile

KEPT_DRAWS = 200_000
"""The newest draws of each line are kept."""

Outcome: TypeAlias = Literal["answer", "refuse", "drop", "lose_response", "out"]
"""An outcome: "refuse" is a 503, "drop" and "lose_response" end the connection before and after, "out": an outage."""


@dataclass(frozen=True, slots=True)
class Fate:
    """A request's outcome, and the position of its latency among all, in [0, 1)."""

    outcome: Outcome
    position: float


@dataclass(slots=True)
class Drawn:
    """The draws so far. Times are in milliseconds."""

    requests: int = 0
    """Without those during an outage."""
    refused: int = 0
    reset: int = 0
    out: int = 0
    """Requests during an outage."""
    late: int = 0
    """Requests that the store itself took longer for than was drawn."""
    latencies_ms: dict[str, list[float]] = field(default_factory=dict)
    """Drawn, by line."""
    answered_ms: dict[str, list[float]] = field(default_factory=dict)
    """How long requests took until they were answered, by line; longer than drawn if late or limited by bandwidth."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Drawn:
        """Read what `to_dict` returned."""
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


class Link:
    """The bandwidth of one host, one way: bytes pass one after the other, whatever their connection."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def pass_through(self, now_s: float, size_bytes: int) -> float:
        """Return when these bytes are through."""
        self._free_s = max(self._free_s, now_s) + size_bytes / self._bytes_per_s
        return self._free_s


class StoreModel:
    """
    Decides about the requests to one store.

    Args:
        profile: The store's.
        seed: The same seed and order of requests give the same outcomes and positions.
    """

    def __init__(self, profile: StoreProfile, seed: int) -> None:
        self._profile = profile
        self._chance = random.Random(seed)
        self._began_s: float | None = None
        self._links: dict[tuple[str, str], Link] = {}
        self._drawn_ms = {name: deque[float](maxlen=KEPT_DRAWS) for name in profile.lines}
        self._answered_ms = {name: deque[float](maxlen=KEPT_DRAWS) for name in profile.lines}
        self._counts = Drawn()
        self.is_out = False
        """Whether every request is answered with 503, beside the outages of the profile."""

    def fate(self, now_s: float) -> Fate:
        """Draw the fate of a request that arrives now; the first one begins the periods of the profile's outages."""
        if self._is_out(now_s):
            self._counts.out += 1
            return Fate("out", 0.0)
        outcome, position = self._chance.random(), self._chance.random()
        self._counts.requests += 1
        refused, reset = self._profile.refused_share, self._profile.reset_share
        if outcome < refused:
            self._counts.refused += 1
            return Fate("refuse", position)
        if outcome < refused + reset:
            self._counts.reset += 1
            return Fate("drop" if outcome < refused + reset / 2 else "lose_response", position)
        return Fate("answer", position)

    def answer_due_s(
        self, fate: Fate, host: str, began_s: float, now_s: float, sent_bytes: int, received_bytes: int
    ) -> float:
        """
        Return when a request is to be answered; before `now_s`, it is late.

        Args:
            fate: The request's.
            host: Its sender's address.
            began_s: When it arrived.
            now_s: When the store itself has answered.
            sent_bytes: Size of the request's body.
            received_bytes: Size of the answer's.
        """
        name = "small" if max(sent_bytes, received_bytes) <= SMALL_BYTES_MAX else "large"
        line = self._profile.lines.get(name)
        latency_ms = 0.0 if line is None else line.at(fate.position)
        due_s = began_s + latency_ms / 1000
        is_late = now_s > due_s
        for way, size_bytes in (("up", sent_bytes), ("down", received_bytes)):
            due_s = max(due_s, self._through_s(host, way, began_s, size_bytes))
        if line is not None:
            self._drawn_ms[name].append(latency_ms)
            self._answered_ms[name].append((max(due_s, now_s) - began_s) * 1000)
            self._counts.late += is_late
        return due_s

    def drawn(self) -> Drawn:
        """Return what was drawn so far."""
        return replace(
            self._counts,
            latencies_ms={name: list(kept) for name, kept in self._drawn_ms.items()},
            answered_ms={name: list(kept) for name, kept in self._answered_ms.items()},
        )

    def _is_out(self, now_s: float) -> bool:
        if self._began_s is None:
            self._began_s = now_s
        every_s, length_s = self._profile.outage_every_s, self._profile.outage_s
        return self.is_out or (every_s > 0 and (now_s - self._began_s) % every_s >= every_s - length_s)

    def _through_s(self, host: str, way: str, began_s: float, size_bytes: int) -> float:
        if self._profile.bandwidth_bytes_per_s is None or not size_bytes:
            return began_s
        link = self._links.setdefault((host, way), Link(self._profile.bandwidth_bytes_per_s))
        return link.pass_through(began_s, size_bytes)
