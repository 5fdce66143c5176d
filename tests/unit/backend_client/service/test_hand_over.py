"""How a task hands over a snapshot; no failure of it fails the task (I13)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend_client.service.hand_over import hand_over_snapshot
from backend_client.table.state_table import StateTable
from dstl_service.wire import CheckpointRef
from storage.errors import ConflictError, DstlError, InvalidInputError, UnavailableError
from storage.key_groups import KeyGroupRange


class RecordingSidecar:
    """A service that accepts a snapshot, or answers with an error."""

    def __init__(self, error: DstlError | None = None) -> None:
        self.error = error
        self.posted: list[tuple[str, dict[str, Any]]] = []

    def post(self, path: str, body: dict[str, Any], patience_s: float | None = None) -> None:
        """Answer a request."""
        assert (Path(body["path"]) / "CURRENT").exists()
        self.posted.append((path, body))
        if self.error is not None:
            raise self.error


@pytest.fixture
def table(tmp_path: Path) -> Iterator[StateTable]:
    """Return a table at a version."""
    made = StateTable.open(tmp_path)
    made.advance([(b"\0\x05k", b"v")], "7.0.u")
    yield made
    made.close()


def hand_over(table: StateTable, sidecar: RecordingSidecar) -> bool:
    """Hand a snapshot over."""
    version = CheckpointRef(7, 0, "u")
    # Replace table and client.
    return hand_over_snapshot(table, sidecar, "job", "op", KeyGroupRange(0, 9), version)  # type: ignore[arg-type]


def test_sidecar_gets_the_folder(table: StateTable, tmp_path: Path) -> None:
    """The sidecar gets the table's key groups, version and folder; the folder is the sidecar's from then on."""
    sidecar = RecordingSidecar()

    assert hand_over(table, sidecar)
    [(path, body)] = sidecar.posted
    folder = body.pop("path")
    assert path == "/v1/jobs/job/materializations"
    assert body == {"operator": "op", "first_key_group": 0, "last_key_group": 9, "version": "7.0.u"}
    assert list(tmp_path.glob("*.snapshot-*")) == [Path(folder)]


@pytest.mark.parametrize("kind", [UnavailableError, ConflictError, InvalidInputError])
def test_refused_snapshot_fails_nothing(table: StateTable, tmp_path: Path, kind: type[DstlError]) -> None:
    """I13: whatever the sidecar answers, the task keeps its table, and no folder is left."""
    assert not hand_over(table, RecordingSidecar(kind("no")))

    assert not list(tmp_path.glob("*.snapshot-*"))
    assert table.get(b"\0\x05k") == b"v"


def test_snapshot_without_room_fails_nothing(
    table: StateTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I13, I16: a disk without room for a snapshot costs the snapshot, not the task."""
    (tmp_path / "0.snapshot-x").write_text("in the way")
    monkeypatch.setattr("uuid.uuid4", lambda: type("Fixed", (), {"hex": "x"}))

    assert not hand_over(table, RecordingSidecar())
    assert table.get(b"\0\x05k") == b"v"


def test_table_elsewhere_is_not_stored(table: StateTable) -> None:
    """I10: a table at another version than the checkpoint never becomes its materialization."""
    sidecar = RecordingSidecar()
    version = CheckpointRef(8, 0, "u")
    groups = KeyGroupRange(0, 9)

    # Replace table and client.
    assert not hand_over_snapshot(table, sidecar, "job", "op", groups, version)  # type: ignore[arg-type]
    assert sidecar.posted == []
