"""The table of a partition, and where it is opened when the local disk fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backend_client.service import partition_table, restore
from backend_client.service.deadline import Deadline
from backend_client.service.restore import Advance
from backend_client.settings import BackendSettings
from backend_client.table.local_disk import LocalDiskError
from backend_client.table.memory_table import MemoryTable
from backend_client.table.state_table import StateTable
from dstl_service.wire import CheckpointRef
from storage.key_groups import KeyGroupRange


def test_a_table_in_memory_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I16: where the disk fails no restore beside the batches would last, so rows are not set aside for one."""
    has_deadline: list[bool] = []

    def advance(table: StateTable, *given: Any) -> Advance:
        has_deadline.append(isinstance(given[-1], Deadline))
        if not isinstance(table, MemoryTable):
            raise LocalDiskError("full")
        return Advance(1)

    monkeypatch.setattr(partition_table, "kept_client", lambda _: None)
    monkeypatch.setattr(restore, "_advance", advance)
    settings = BackendSettings(f"file://{tmp_path / 'store'}", "job", local_dir=str(tmp_path / "local"))
    table, advanced = partition_table.open_partition(
        settings, "uid", "op", KeyGroupRange(0, 1), CheckpointRef(7, 0, "u"), 1.0
    )
    table.close()

    assert (advanced.changes, has_deadline) == (1, [True, False])
