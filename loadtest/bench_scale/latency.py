"""Checkpoints of many hosts on a virtual clock: each host's own uploader, then the manifest."""

from __future__ import annotations

import asyncio
from random import Random

from dstl_service.uploads.settings import UploadSettings
from loadtest.virtual_uploads import VirtualStore, change_set, uploader
from tools.servers.faults.store_profiles import StoreProfile

_PAUSE_S = 0.2


def checkpoint_latencies_ms(
    profile: StoreProfile,
    hosts: int,
    object_bytes: int,
    manifest_bytes: int,
    checkpoints: int,
    seed: int,
    settings: UploadSettings,
) -> list[float]:
    """
    Return how long checkpoints take from the request to flush until the manifest is stored.

    Every host uploads one object; when all are stored, the manifest is put. Its PUT is conditional and is not repeated
    early.

    Args:
        profile: The store's; only its latencies count.
        hosts: Number of hosts, >= 1.
        object_bytes: Size of each host's object.
        manifest_bytes: Size of the manifest.
        checkpoints: How many are made, one after the other.
        seed: Seed of all draws.
        settings: Settings of each uploader.
    """
    store = VirtualStore(profile, Random(seed))
    uploaders = [uploader(settings, f"host-{number}") for number in range(hosts)]
    sets = [change_set(object_bytes)]
    store.size_bytes = object_bytes
    latencies: list[float] = []

    async def checkpoint() -> list[asyncio.Future[bool]]:
        begun_s = store.loop.time()
        uploads = [one.begin("job", sets) for one in uploaders]
        await asyncio.gather(*(upload.stored() for upload in uploads))
        await asyncio.sleep(store.latency_s(manifest_bytes))
        latencies.append((store.loop.time() - begun_s) * 1000)
        return [asyncio.ensure_future(upload.ended()) for upload in uploads]

    async def run() -> None:
        ends: list[asyncio.Future[bool]] = []
        for _ in range(checkpoints):
            ends = [end for end in ends if not end.done()] + await checkpoint()
            await asyncio.sleep(_PAUSE_S)
        await asyncio.gather(*ends)

    store.run(run())
    return latencies
