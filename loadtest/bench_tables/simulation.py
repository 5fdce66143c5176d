"""
Checkpoints on a virtual clock: the uploads of a real run, at a store with the latencies and bandwidth of a profile.

A host uploads what its subtasks have for the checkpoint, and all bytes of a host pass through one link. Change
sets are uploaded at the checkpoint only, though a task sends five megabytes as soon as it has them. When all hosts are
done, one small object makes the checkpoint: our manifest, Flink's metadata. It is never repeated early.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil
from random import Random
from typing import Any

from dstl_service.intake.change_sets import BatchSettings
from dstl_service.uploads.settings import UploadSettings
from dstl_service.uploads.uploader import Upload, Uploader
from loadtest.bench_tables.published import PARALLELISM, SLOTS_PER_HOST
from loadtest.virtual_uploads import VirtualStore, uploader
from tools.servers.faults.store_model import Link
from tools.servers.faults.store_profiles import StoreProfile

BATCH_BYTES = BatchSettings().size_bytes
_PAUSE_S = 0.2
_MANIFEST_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Layout:
    """How a job's subtasks lie on hosts."""

    name: str
    hosts: int
    parallelism: int = PARALLELISM

    def subtasks(self, host: int) -> int:
        """Return the number of subtasks of a host."""
        return self.parallelism // self.hosts + (host < self.parallelism % self.hosts)


ONE_HOST = Layout("one host", 1)
FLINKS = Layout("13 hosts", ceil(PARALLELISM / SLOTS_PER_HOST))

Parts = Callable[[Random], Sequence[float]]
"""Draws the sizes in bytes of what one subtask uploads for a checkpoint."""

Objects = list[list[float]]
"""Sizes in bytes of the objects of each host."""


def shared_objects(draw: Parts, layout: Layout, chance: Random) -> Iterator[Objects]:
    """Yield checkpoints whose subtasks share objects on each host: one, or as many as its batches need."""
    while True:
        subtasks = [range(layout.subtasks(host)) for host in range(layout.hosts)]
        yield [_batches(sum(sum(draw(chance)) for _ in of_host)) for of_host in subtasks]


def own_files(draw: Parts, layout: Layout, chance: Random) -> Iterator[Objects]:
    """Yield checkpoints whose subtasks upload files of their own."""
    while True:
        subtasks = [range(layout.subtasks(host)) for host in range(layout.hosts)]
        yield [[size for _ in of_host for size in draw(chance)] for of_host in subtasks]


def _batches(size_bytes: float) -> list[float]:
    """Divide the change sets of a host into batches, each of which becomes an object."""
    batches = max(1, ceil(size_bytes / BATCH_BYTES))
    return [size_bytes / batches] * batches


class LinkedStore(VirtualStore):
    """
    A store whose hosts have links of the profile's bandwidth; the size of each object counts.

    Args:
        profile: The store's.
        chance: Source of all draws.
    """

    def __init__(self, profile: StoreProfile, chance: Random) -> None:
        super().__init__(profile, chance)
        self._bytes_per_s = profile.bandwidth_bytes_per_s
        self._links: dict[str, Link] = {}

    def delay_s(self, host: str, size_bytes: float) -> float:
        """Draw how long a PUT takes that begins now."""
        now_s, latency_s = self.loop.time(), self.latency_s(int(size_bytes))
        if self._bytes_per_s is None:
            return latency_s
        link = self._links.setdefault(host, Link(self._bytes_per_s))
        return max(latency_s, link.pass_through(now_s, int(size_bytes)) - now_s)

    def _call(self, call: Any, attempt: asyncio.Future[Any]) -> None:
        self.puts += 1
        key, _ = call.args
        _, _, host, _, size = key.split("/")
        self.loop.call_later(self.delay_s(host, int(size)), lambda: attempt.set_result(call()))


def uploaded_ms(
    profile: StoreProfile, objects: Iterator[Objects], checkpoints: int, settings: UploadSettings, seed: int
) -> list[float]:
    """
    Return how long checkpoints take whose objects our own uploader puts, from the request to the manifest.

    Args:
        profile: The store's; only latencies and bandwidth count.
        objects: Of each checkpoint.
        checkpoints: How many are made, one after the other.
        settings: Of each host's uploader.
        seed: Seed of all draws.
    """
    store, took_ms, numbers = LinkedStore(profile, Random(seed)), list[float](), count()
    uploaders = [uploader(settings, f"host-{number}") for number in range(len(next(objects)))]

    async def run() -> None:
        ends: list[asyncio.Future[bool]] = []
        for _ in range(checkpoints):
            begun_s = store.loop.time()
            hosts = enumerate(next(objects))
            uploads = [_upload(uploaders[host], host, next(numbers), size) for host, sizes in hosts for size in sizes]
            await asyncio.gather(*(upload.stored() for upload in uploads))
            await asyncio.sleep(store.latency_s(_MANIFEST_BYTES))
            took_ms.append((store.loop.time() - begun_s) * 1000)
            ends = [end for end in ends if not end.done()]
            ends += [asyncio.ensure_future(upload.ended()) for upload in uploads]
            await asyncio.sleep(_PAUSE_S)
        await asyncio.gather(*ends)

    store.run(run())
    return took_ms


def plain_ms(profile: StoreProfile, objects: Iterator[Objects], checkpoints: int, seed: int) -> list[float]:
    """Return the durations for hosts that put all their objects at once, each in one attempt however long it takes."""
    store, took_ms = LinkedStore(profile, Random(seed)), list[float]()

    async def run() -> None:
        for _ in range(checkpoints):
            hosts = enumerate(next(objects))
            delays = [store.delay_s(str(number), size) for number, sizes in hosts for size in sizes]
            took_s = max(delays, default=0.0) + store.latency_s(_MANIFEST_BYTES)
            took_ms.append(took_s * 1000)
            await asyncio.sleep(took_s + _PAUSE_S)

    store.run(run())
    return took_ms


def _upload(one: Uploader, host: int, number: int, size_bytes: float) -> Upload:
    """Return an upload of this many bytes, which do not exist: encoding and summing them would take hours in all."""
    one.hedging.upload_begins()
    return Upload(one, "job", f"job/segments/{host}/{number}/{int(size_bytes)}", (), [], int(size_bytes))
