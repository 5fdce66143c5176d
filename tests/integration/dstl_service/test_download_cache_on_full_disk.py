"""The download cache on a real disk that is full, fills up, or becomes read-only: reads succeed (I16)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dstl_service.restore.download_cache import DownloadCache
from storage.clock import SystemClock, SystemIds
from storage.memory_store import MemoryStore
from storage.testing import RecordingStore
from tests.support.machine import fill, small_disk

pytestmark = pytest.mark.integration

KEYS = [f"job/materialized/op/{number}.sst" for number in range(6)]
SIZE = 300_000


def content(key: str) -> bytes:
    """Return an object's bytes."""
    return key.encode() * (SIZE // len(key))


@pytest.mark.parametrize("state", ["fills up", "is full", "is read-only"])
def test_reads_go_on(tmp_path: Path, state: str) -> None:
    """I16: every read returns the right bytes; data that do not fit on the disk are read from the store each time."""
    store = RecordingStore(MemoryStore())
    for key in KEYS:
        store.put(key, content(key))
    with small_disk(tmp_path / "disk", 1_000_000) as disk:
        if state == "is full":
            fill(disk)
        if state == "is read-only":
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        cache = DownloadCache(store, disk / "downloads", 1 << 30, 600, SystemClock(), SystemIds())
        store.clear()
        for _ in range(3):
            assert [cache.get(key) for key in KEYS] == [content(key) for key in KEYS]
        kept = cache.figures.bytes_kept // SIZE

        assert cache.figures.failures > 0
        assert (kept >= 1) == (state == "fills up")
        assert store.count("get") == 6 * 3 - kept * 2
        cache.close()
        assert state != "fills up" or [path for path in (disk / "downloads").rglob("*") if path.is_file()] == []
