"""Tables on a real disk that is full or fills up: slow, and never wrong (I16). Needs the right to mount."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from backend_client.service.restore import advance_to_base
from backend_client.table.local_disk import LocalDiskError
from backend_client.table.memory_table import MemoryTable
from backend_client.table.opening import open_advanced
from backend_client.table.state_table import StateTable
from dstl_service.wire import CheckpointRef
from storage.checksum import checksum128
from storage.key_groups import KeyGroupRange
from tests.support.machine import fill, small_disk

pytestmark = pytest.mark.integration

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder with room for 3 MiB."""
    with small_disk(tmp_path / "disk", 3 * MIB) as folder:
        yield folder


def test_table_on_a_disk_that_fills_keeps_its_content(disk: Path) -> None:
    """I1: a table that is open read-only, and that the full disk does not let anyone write, does not count as empty."""
    old = {number.to_bytes(6, "big"): os.urandom(100) for number in range(5000)}
    new = {number.to_bytes(6, "big"): b"new" for number in range(3)}
    for version, changes in (("1.0.u", old), ("2.0.u", new)):
        with closing(StateTable.open(disk / "t")) as table:
            table.advance(changes.items(), version)
    fill(disk)
    with closing(StateTable.open(disk / "t")) as table:
        with pytest.raises(LocalDiskError, match="No space left"), table.making_snapshot():
            pass

        assert (table.version, dict(table.items())) == ("2.0.u", {**old, **new})
    (disk / "filler").unlink()
    with closing(StateTable.open(disk / "t")) as table:
        assert (table.version, dict(table.items())) == ("2.0.u", {**old, **new})


class Snapshots:
    """A service that answers each restore with a snapshot of the whole table, and counts them."""

    def __init__(self, folder: Path) -> None:
        self.asked = 0
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}

    @contextmanager
    def restore(self, *_: Any) -> Iterator[Iterator[tuple[dict[str, Any], bytes]]]:
        """Return the frames."""
        self.asked += 1
        yield self._frames()

    def _frames(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        yield {"kind": "plan", "full": True, "snapshots": 1}, b""
        snapshot = {"kind": "snapshot", "index": "the.index", "version": "1.0.u", "files": len(self.files)}
        yield {**snapshot, "first": 0, "last": 3, "counted": [[0, 3]]}, b""
        for name, data in self.files.items():
            file = {"kind": "file", "name": name, "object": f"{name}.object", "file_size": len(data)}
            yield {**file, "offset": 0, "checksum": checksum128(data)}, data
        yield {"kind": "end"}, b""


@pytest.mark.parametrize("is_full", [True, False])
def test_snapshot_without_room_goes_into_memory(disk: Path, tmp_path: Path, is_full: bool) -> None:
    """I14, I16: a disk that is full, or fills up during a snapshot, costs one more restore and fails nothing."""
    content = {number.to_bytes(6, "big"): os.urandom(1000) for number in range(4 * MIB // 1000)}
    with closing(StateTable.open(tmp_path / "source")) as source:
        source.advance(content.items(), "1.0.u")
        with source.making_snapshot() as folder:
            client: Any = Snapshots(folder)
    if is_full:
        fill(disk)
    base = CheckpointRef(2, 0, "u")
    table, _ = open_advanced(
        disk / "t", lambda table: advance_to_base(table, client, "job", "op", KeyGroupRange(0, 3), base)
    )

    with closing(table):
        assert (type(table), table.version, dict(table.items())) == (MemoryTable, "2.0.u", content)
        assert client.asked == (1 if is_full else 2)
