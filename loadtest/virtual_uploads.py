"""The service's uploader on a virtual clock, at a store that draws how long each PUT takes and keeps nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from dstl_service.uploads.settings import UploadSettings
from dstl_service.uploads.uploader import ThreadPerCall, Uploader
from storage.key_groups import KeyGroupRange
from storage.memory_store import MemoryStore
from storage.model import ChangeSetId, Segment, Writer
from storage.object_store import ObjectData
from storage.testing import FakeIds
from tools.servers.faults.store_profiles import SMALL_BYTES_MAX, StoreProfile
from tools.virtual_time import VirtualLoop


class _Sink(MemoryStore):
    def put(self, key: str, data: ObjectData, *, if_absent: bool = False) -> None:
        """Keep nothing."""


def uploader(settings: UploadSettings, host_id: str = "host") -> Uploader:
    """Return an uploader; its attempts are calls of the virtual loop in which it runs."""
    return Uploader(
        _Sink(),
        ThreadPerCall("is not used"),
        settings,
        FakeIds(),
        host_id,
        slots=settings.threads,
        hedge_share_max=settings.hedge_share_max,
    )


def change_set(size_bytes: int) -> Segment:
    """Return a change set of this size."""
    set_id = ChangeSetId("job", "operator", 1, Writer(1, 1), 0, 0)
    return Segment.of(set_id, KeyGroupRange(0, 127), 1, bytes(size_bytes))


class VirtualStore:
    """
    Draws the latencies of a profile; only those of requests without failures.

    Args:
        profile: The store's.
        chance: Source of all draws.
    """

    def __init__(self, profile: StoreProfile, chance: Random) -> None:
        self.puts = 0
        """Number of PUTs that uploaders have begun."""
        self.size_bytes = 0
        """Size of the objects that uploaders put."""
        self.loop = VirtualLoop(self._call)
        self._profile = profile
        self._chance = chance

    def latency_s(self, size_bytes: int) -> float:
        """Draw how long a PUT takes."""
        line = self._profile.small if size_bytes <= SMALL_BYTES_MAX else self._profile.large
        return 0.0 if line is None else line.at(self._chance.random()) / 1000

    def run(self, story: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end, once."""
        try:
            self.loop.run_until_complete(story)
        finally:
            self.loop.close()

    def _call(self, call: Callable[[], Any], attempt: asyncio.Future[Any]) -> None:
        self.puts += 1
        self.loop.call_later(self.latency_s(self.size_bytes), lambda: attempt.set_result(call()))
