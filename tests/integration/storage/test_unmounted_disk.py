"""A folder as a store, on a disk that is unmounted."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.errors import UnavailableError
from storage.local_store import LocalStore
from tests.support.machine import small_disk


def test_store_of_an_unmounted_disk_does_not_answer(tmp_path: Path) -> None:
    """I11: nothing counts as absent, and nothing is stored on the disk below the mount point."""
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        store = LocalStore(disk / "state")
        store.put("job/a", b"there")

    with pytest.raises(UnavailableError, match="nothing is mounted on"):
        store.get("job/a")
    with pytest.raises(UnavailableError, match="nothing is mounted on"):
        store.put("job/b", b"new", if_absent=True)
    assert list(disk.iterdir()) == []
