"""The rounds of a follower."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from backend_client.settings import BackendSettings
from backend_client.standby.copy_client import NoRoomError
from backend_client.standby.follower import LOG_BYTES_MAX, Follower, log_of
from backend_client.standby.orders import Order, TableName
from backend_client.standby.upkeep import NO_ROOM_S
from dstl_service.wire import BRANCH_GENERATIONS, CheckpointRef
from storage.key_groups import KeyGroupRange

NAME = TableName("op", KeyGroupRange(0, 9))


class CrampedClient:
    """A service whose answers find room only sometimes."""

    def __init__(self, *, has_room: bool = False) -> None:
        self.has_room = has_room
        self.asked = self.read_bytes = 0

    @contextmanager
    def restore(self, *_: Any, **__: Any) -> Iterator[Iterator[tuple[dict[str, Any], bytes]]]:
        """Answer with an empty table."""
        self.asked += 1
        if not self.has_room:
            raise NoRoomError("the disk is full")
        plan = {"kind": "plan", "full": True, "bytes": 0, "snapshots": 0, "materialize": False}
        yield iter([(plan, b""), ({"kind": "end"}, b"")])


def order_of(tmp_path: Path, epoch: int, base: CheckpointRef) -> Order:
    """Return an order for the one copy."""
    settings = BackendSettings(f"file://{tmp_path / 'store'}", "job", local_dir=str(tmp_path / "local"))
    return Order(settings, "uid", epoch, base, (NAME,))


def test_copy_without_room_is_tried_again(tmp_path: Path) -> None:
    """A host whose disk was full for a moment keeps its copies again when there is room."""
    client, now = CrampedClient(), [0.0]
    follower = Follower(tmp_path, client, lambda: now[0])  # type: ignore[arg-type]
    order = order_of(tmp_path, 1, CheckpointRef(7, 0, "u"))
    for _ in range(3):
        follower.round(order)
    assert (client.asked, follower.copies) == (1, {})
    client.has_room = True
    now[0] = NO_ROOM_S
    follower.round(order)

    assert follower.copies[NAME].checkpoint_id == 7


def test_copy_of_what_a_rewind_gave_up_is_made_again(tmp_path: Path) -> None:
    """A copy past the target of a rewind is not taken for a recent one: it leads to no checkpoint of the new branch."""
    client = CrampedClient(has_room=True)
    follower = Follower(tmp_path, client)  # type: ignore[arg-type]
    follower.round(order_of(tmp_path, 1, CheckpointRef(9, 0, "given-up")))
    rewound = CheckpointRef(4, 2 * BRANCH_GENERATIONS, "target")
    follower.round(order_of(tmp_path, 2, rewound))

    assert client.asked == 2
    assert (follower.copies[NAME].checkpoint_id, follower.copies[NAME].branch) == (4, rewound.branch)
    follower.round(order_of(tmp_path, 2, rewound))
    assert client.asked == 2


def test_log_of_a_year_is_bounded(tmp_path: Path) -> None:
    """Tables beyond `standby_bytes_max` are refused for good, every ten minutes at another size: a line for each."""
    handler = log_of(tmp_path)
    text = "x" * 10_000
    for number in range(3 * LOG_BYTES_MAX // len(text)):
        handler.handle(logging.makeLogRecord({"msg": f"{number} {text}"}))
    handler.close()

    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["log", "log.1"]
    assert all(file.stat().st_size <= LOG_BYTES_MAX for file in files)
    assert f"{number} {text}" in files[0].read_text()


def test_tables_of_a_former_parallelism_are_forgotten(tmp_path: Path) -> None:
    """A job that is rescaled for a year leaves nothing of its former tables in the follower's memory."""
    follower = Follower(tmp_path, CrampedClient(), lambda: 0.0)  # type: ignore[arg-type]
    sizes = []
    for last in range(10, 30):
        order = order_of(tmp_path, 1, CheckpointRef(7, 0, "u"))
        follower.round(replace(order, tables=(TableName("op", KeyGroupRange(0, last)),)))
        sizes.append(follower.remembered)

    assert set(sizes) == {2}
