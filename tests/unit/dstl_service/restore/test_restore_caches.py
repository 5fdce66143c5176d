"""The service's caches in restores: what is shared, what is counted, and how a restore works without them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dstl_service.restore.segment_cache import PLACE_BYTES
from dstl_service.settings import CacheSettings, ServiceSettings
from storage.memory_store import MemoryStore
from storage.testing import Fault, FaultKind, FaultyStore, RecordingStore
from tests.unit.dstl_service.http_life import service

CHECKPOINTS = 3
TABLES = 10


def test_tables_share_downloads(tmp_path: Path) -> None:
    """Ten tables restored at once read each object once from the store, and later ones read none (as Flink's cache)."""
    faulty = FaultyStore(MemoryStore())
    store = RecordingStore(faulty)
    with service(store) as life:
        life.open()
        base = None
        for checkpoint_id in range(CHECKPOINTS):
            refs = [
                life.append(bytes([checkpoint_id, partition]), checkpoint_id=checkpoint_id, partition=partition)
                for partition in range(TABLES)
            ]
            base = life.complete(checkpoint_id, base, *refs)
    assert base is not None
    wanted = [bytes([checkpoint_id, partition]) for checkpoint_id in range(CHECKPOINTS) for partition in range(TABLES)]
    with service(store, cache=CacheSettings(bytes_max=0, folder=tmp_path)) as life:
        life.client.get(f"{life.path}/checkpoints")
        store.clear()
        faulty.inject(Fault("get", FaultKind.DELAY, "*.seg", times=None, delay_ms=50))
        with ThreadPoolExecutor(TABLES) as threads:
            answers = list(threads.map(lambda _: life.restore(base), range(TABLES)))
        answers.append(life.restore(base))
        metrics = life.client.get("/metrics").text.splitlines()

    assert answers == [(True, wanted)] * (TABLES + 1)
    assert store.count("get", "*.seg") == CHECKPOINTS
    assert store.count("get_range", "*.seg") == 0
    assert f"dstl_download_cache_misses {float(CHECKPOINTS)}" in metrics
    assert f"dstl_download_cache_hits {float(CHECKPOINTS * TABLES)}" in metrics
    assert "dstl_download_cache_failures 0.0" in metrics
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("folder", ["file", "file/below", "damaged"])
def test_restore_needs_no_cache(tmp_path: Path, folder: str) -> None:
    """I16: a restore whose cache cannot be written, or was damaged, gets the same content from the store."""
    (tmp_path / "file").write_bytes(b"")
    store = MemoryStore()
    with service(store, cache=CacheSettings(bytes_max=0, folder=tmp_path / folder)) as life:
        life.open()
        ref = life.complete(0, None, life.append(b"one"))
        answers = []
        for _ in range(3):
            answers.append(life.restore(ref))
            for path in (tmp_path / folder).rglob("[0-9]"):
                path.write_bytes(b"damaged")

    assert answers == [(True, [b"one"])] * 3


def test_recent_sets_need_no_store() -> None:
    """Content that was just uploaded is restored from memory, and counted there."""
    store = RecordingStore(MemoryStore())
    with service(store) as life:
        life.open()
        ref = life.complete(0, None, life.append(b"one"))
        store.clear()
        assert life.restore(ref) == (True, [b"one"])
        metrics = life.client.get("/metrics").text.splitlines()

    assert (store.count("get", "*.seg"), store.count("get_range", "*.seg")) == (0, 0)
    assert {"dstl_cache_hits 1.0", "dstl_cache_misses 0.0", f"dstl_cache_bytes {3.0 + PLACE_BYTES}"} <= set(metrics)


@pytest.mark.parametrize(
    ("storage", "folder", "expected"),
    [
        ("s3://bucket", None, True),
        ("file:///state", None, False),
        ("file:///mnt/state", Path("/cache"), True),
    ],
)
def test_downloads_are_kept_where_that_helps(storage: str, folder: Path | None, expected: bool) -> None:
    """Copies of a remote store are kept on disk; copies of local files, perhaps on the same disk, only on request."""
    assert ServiceSettings(storage, cache=CacheSettings(folder=folder)).keeps_downloads is expected
