"""The files between tasks and followers, and the plan that tells hosts which copies they keep."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from backend_client.settings import BackendSettings
from backend_client.standby.orders import (
    ORDER,
    STATUS,
    CopyPlan,
    Order,
    StandbyReport,
    StandbyStatus,
    TableName,
    id_of,
    read_order,
    read_status,
    write,
)
from dstl_service.wire import CheckpointRef
from storage.errors import InvalidInputError
from storage.key_groups import KeyGroupRange

BASE = CheckpointRef(7, 1, "u")
SETTINGS = BackendSettings("file:///s", "job", local_dir="/l", standby_replicas=1, idle_timers=0.5)
TABLES = (TableName("op", KeyGroupRange(0, 63)), TableName("Zählung", KeyGroupRange(64, 127)))


def test_order_and_status_are_read_as_written(tmp_path: Path) -> None:
    """The follower reads exactly what a task wrote, and the other way round; each file is replaced as a whole."""
    order, status = Order(SETTINGS, "uid", 3, BASE, TABLES), StandbyStatus(2, 1, 6, 100, 200, 300)
    for _ in range(2):
        write(tmp_path, ORDER, order)
        write(tmp_path, STATUS, status)

    assert (read_order(tmp_path), read_status(tmp_path)) == (order, status)
    assert sorted(file.name for file in tmp_path.iterdir()) == [ORDER, STATUS]
    assert (tmp_path / ORDER).stat().st_mode & 0o077 == 0


def test_order_of_a_job_whose_operators_changed(tmp_path: Path) -> None:
    """A follower understands the settings of a start that renames and removes operators, and of a fork."""
    changed = {"renamed": {"old": "new", "a": "b"}, "removed": ["gone"], "fork_of": "parent", "standby_replicas": 1}
    order = Order(BackendSettings.of("file:///s", "job", changed), "uid", 3, BASE, TABLES)
    write(tmp_path, ORDER, order)

    assert read_order(tmp_path) == order


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "{}", '{"settings": {"new_option": 1}, "tables": []}', '{"tables": [["op", 5, 1]]}']
)
def test_order_of_another_version_is_no_order(tmp_path: Path, text: str) -> None:
    """I15: a file that this version does not understand is refused, and counts as none."""
    (tmp_path / ORDER).write_text(text)
    (tmp_path / STATUS).write_text(text)

    assert read_order(tmp_path) is None
    with pytest.raises(InvalidInputError):
        Order.from_json(text)
    if text != "{}":
        assert read_status(tmp_path) is None


def test_damaged_files_are_none(tmp_path: Path) -> None:
    """I16: a file that is no text, as a disk may leave it, fails no task; the next order replaces it."""
    for name in (ORDER, STATUS):
        (tmp_path / name).write_bytes(b"\xff{\x80")

    assert (read_order(tmp_path), read_status(tmp_path)) == (None, None)


def test_plan_tells_each_host_its_tables() -> None:
    """A host gets the key groups of the partitions whose copies it keeps, of all operators; others get nothing."""
    plan = CopyPlan(("a", "b"), 128, {"op": (0, 1, -1, 0), "other": (1, 1)})

    found = [(table.operator, table.key_groups.to_text()) for table in plan.of_host("a")]
    assert found == [("op", "00000-00031"), ("op", "00096-00127")]
    assert len(plan.of_host("b")) == 3
    assert plan.of_host("c") == plan.of_host(None) == ()
    assert id_of(plan.of_host("a")) != id_of(plan.of_host("b"))


def test_newer_orders_are_known_by_their_age() -> None:
    """A later checkpoint is newer, and any of a newer driver."""
    order = Order(SETTINGS, "uid", 3, BASE, ())

    assert replace(order, base=CheckpointRef(8, 1, "v")).age > order.age
    assert replace(order, epoch=4, base=CheckpointRef(2, 1, "w")).age > order.age


def test_report_says_how_far_copies_are_behind() -> None:
    """The lag is that of the oldest copy; without a copy there is none."""
    status = StandbyStatus(tables=2, missing=1, oldest_id=4, size_bytes=9, tables_id=5)

    assert StandbyReport.of("a", status, BASE) == StandbyReport("a", 2, 1, 3, 9, 5)
    assert StandbyReport.of("a", StandbyStatus(), BASE).lag == 0
    assert StandbyReport(**asdict(StandbyReport.of("a", status, BASE))).lag == 3
