"""Tables on a real disk that is full or fills up: slow, and never wrong (I16). Needs the right to mount."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from backend_client.local_disk import LocalDiskError
from backend_client.state_table import StateTable
from tests.stack.small_disk import fill, small_disk

pytestmark = pytest.mark.integration

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder with room for 3 MiB."""
    with small_disk(tmp_path / "disk", 3 * MIB) as folder:
        yield folder


def test_table_on_a_disk_that_fills_keeps_its_content(disk: Path) -> None:
    """I1: a table that is open to read, and that the full disk lets nobody write, is not taken for an empty one."""
    old = {number.to_bytes(6, "big"): os.urandom(100) for number in range(5000)}
    new = {number.to_bytes(6, "big"): b"new" for number in range(3)}
    for version, changes in (("1.0.u", old), ("2.0.u", new)):
        with closing(StateTable.open(disk / "t")) as table:
            table.advance(changes.items(), version)
    fill(disk)
    with closing(StateTable.open(disk / "t")) as table:
        with pytest.raises(LocalDiskError, match="disk full"), table.making_snapshot():
            pass

        assert (table.version, dict(table.items())) == ("2.0.u", {**old, **new})
    (disk / "filler").unlink()
    with closing(StateTable.open(disk / "t")) as table:
        assert (table.version, dict(table.items())) == ("2.0.u", {**old, **new})
