"""How a table is brought to the base of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from backend_client.service.deadline import Deadline
from backend_client.service.restore import SlowRestoreError, advance_to_base, read_change_sets
from backend_client.state.keyed_state import table_key
from backend_client.table.local_disk import LocalDiskError
from backend_client.table.state_table import StateTable
from dstl_service.wire import CheckpointRef
from storage.change_set import encode_change_set
from storage.checksum import checksum64, checksum128
from storage.errors import CorruptDataError, DstlError, UnavailableError
from storage.key_groups import KeyGroupRange

GROUPS = KeyGroupRange(10, 19)
BASE = CheckpointRef(7, 0, "u")
END = ({"kind": "end"}, b"")

Frame = tuple[dict[str, Any], bytes]


class ScriptedClient:
    """A service that answers every restore with the same frames and records the requests."""

    def __init__(self, *frames: Frame) -> None:
        self.frames = frames
        self.asked: list[tuple[str | None, str]] = []
        self.patience_s: float | None = None

    @contextmanager
    def restore(
        self,
        job: str,
        operator: str,
        key_groups: KeyGroupRange,
        from_checkpoint: str | None,
        to_checkpoint: str,
        patience_s: float | None = None,
    ) -> Iterator[Iterator[Frame]]:
        """Return the frames."""
        self.asked.append((from_checkpoint, to_checkpoint))
        self.patience_s = patience_s
        yield iter(self.frames)


def plan(*, full: bool) -> Frame:
    """Return the first frame."""
    return {"kind": "plan", "full": full}, b""


def changed(changes: dict[bytes, bytes | None], first: int = 10, last: int = 19) -> Frame:
    """Return the frame of a set written by the owner of these key groups."""
    payload = encode_change_set(changes)
    header = {
        "kind": "segment",
        "object": "7.seg",
        "first": first,
        "last": last,
        "counted": [[max(first, GROUPS.first), min(last, GROUPS.last)]],
        "checksum": f"{checksum64(payload):016x}",
    }
    return header, payload


def key(group: int) -> bytes:
    """Return a table key in this key group."""
    return table_key(group, 0, b"k")


@pytest.fixture
def table(tmp_path: Path) -> Iterator[StateTable]:
    """Return a table at an old version."""
    made = StateTable.open(tmp_path)
    made.advance([(key(10), b"old"), (key(11), b"old")], "3.0.u")
    yield made
    made.close()


def advance(table: StateTable, client: Any, base: CheckpointRef | None = BASE) -> int:
    """Bring the table to the base; return the number of applied changes."""
    return advance_to_base(table, client, "job", "op", GROUPS, base).changes


def test_difference_is_added(table: StateTable) -> None:
    """A table at an ancestor keeps its content and gets the later changes, in order."""
    client = ScriptedClient(plan(full=False), changed({key(10): b"1"}), changed({key(10): b"2", key(11): None}), END)

    assert advance(table, client) == 3
    assert client.asked == [("3.0.u", "7.0.u")]
    assert (table.version, dict(table.items())) == ("7.0.u", {key(10): b"2"})


def test_impatient_task_gives_up_large_restore(table: StateTable) -> None:
    """A task that would have to wait for gigabytes learns so before it has read one; the table is left as it is."""
    header, _ = plan(full=False)
    client = ScriptedClient(({**header, "bytes": 1 << 40}, b""), changed({key(12): b"1"}), END)

    with pytest.raises(SlowRestoreError, match="bytes take longer"):
        advance_to_base(table, client, "job", "op", GROUPS, BASE, until=Deadline(1))  # type: ignore[arg-type]
    assert (table.version, table.get(key(10))) == ("3.0.u", b"old")
    assert client.patience_s is not None
    assert 0 < client.patience_s <= 1


def test_whole_table_needs_more_time_than_a_difference(table: StateTable) -> None:
    """In a second a task expects changes of 150 MB, which may be those of the batch before, but no table of 150 MB."""
    for is_full, comes in ((False, True), (True, False)):
        header, _ = plan(full=is_full)
        client = ScriptedClient(({**header, "bytes": 150 << 20}, b""), changed({key(12): b"1"}), END)
        with nullcontext() if comes else pytest.raises(SlowRestoreError, match="bytes take longer"):
            advance_to_base(table, client, "job", "op", GROUPS, BASE, until=Deadline(1))  # type: ignore[arg-type]
        table.advance([], "3.0.u")


def test_impatient_task_gives_up_slow_restore(table: StateTable) -> None:
    """I1: a table of which only a part came in time has no version, and is restored as a whole the next time."""
    slow = ScriptedClient(plan(full=True), changed({key(12): b"1"}), END)

    with pytest.raises(SlowRestoreError, match="takes longer"):
        advance_to_base(table, slow, "job", "op", GROUPS, BASE, until=Deadline(-1))  # type: ignore[arg-type]
    assert table.version is None
    assert advance(table, ScriptedClient(plan(full=True), changed({key(13): b"2"}), END)) == 1
    assert dict(table.items()) == {key(13): b"2"}


def test_few_checkpoints_are_awaited(table: StateTable) -> None:
    """A table that lacks a checkpoint only is advanced whatever it takes: given up halfway, it would be lost."""
    client = ScriptedClient(plan(full=False), changed({key(10): b"1"}), END)

    assert advance_to_base(table, client, "job", "op", GROUPS, BASE, until=Deadline(1e-9)).changes == 1  # type: ignore[arg-type]


def test_silent_sidecar_is_a_slow_restore(table: StateTable) -> None:
    """An impatient task does not fail when its sidecar cannot answer in time."""

    class SilentClient(ScriptedClient):
        @contextmanager
        def restore(self, *_: Any, **__: Any) -> Iterator[Iterator[Frame]]:
            if not self.asked:
                raise UnavailableError("no answer")
            yield iter(())

    with pytest.raises(SlowRestoreError, match="did not answer in time"):
        advance_to_base(table, SilentClient(), "job", "op", GROUPS, BASE, until=Deadline(1))  # type: ignore[arg-type]
    assert table.version == "3.0.u"


def test_full_restore_begins_empty(table: StateTable) -> None:
    """I14: before the whole log is applied, nothing of another history is left."""
    advance(table, ScriptedClient(plan(full=True), changed({key(12): b"1"}), END))

    assert (table.version, dict(table.items())) == ("7.0.u", {key(12): b"1"})


def test_current_table_asks_nothing(table: StateTable) -> None:
    """A table that is already at the base sends no request."""
    client = ScriptedClient()

    assert advance(table, client, CheckpointRef(3, 0, "u")) == 0
    assert client.asked == []


def test_first_batch_empties_table(table: StateTable) -> None:
    """Before the first checkpoint, any content on the disk belongs to another life of the job."""
    client = ScriptedClient()

    assert advance(table, client, None) == 0
    assert (table.version, dict(table.items()), client.asked) == (None, {}, [])


def test_other_key_groups_are_left_out(table: StateTable) -> None:
    """I14: from a set of a wider owner, only the table's own key groups are applied, both ends included."""
    changes: dict[bytes, bytes | None] = {key(group): b"x" for group in (0, 9, 10, 19, 20, 300)}
    advance(table, ScriptedClient(plan(full=True), changed(changes, 0, 511), END))

    assert list(dict(table.items())) == [key(10), key(19)]


def test_damaged_payload_is_refused(table: StateTable) -> None:
    """I10: bytes that changed in transit are never applied, and the table stays at its version."""
    header, payload = changed({key(10): b"new"})
    client = ScriptedClient(plan(full=False), (header, payload[:-1] + b"?"), END)
    with pytest.raises(CorruptDataError, match=r"7\.seg"):
        advance(table, client)

    assert (table.version, table.get(key(10))) == ("3.0.u", b"old")


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (({"kind": "error", "error": {"kind": "unavailable", "message": "store away"}}, b""), UnavailableError),
        (({"kind": "error", "error": {"kind": "corrupt_data", "message": "bad 7.seg"}}, b""), CorruptDataError),
        (({"kind": "error"}, b""), CorruptDataError),
        (({"kind": "surprise"}, b""), CorruptDataError),
    ],
)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_reported_error_is_raised(table: StateTable, frame: Frame, kind: type[DstlError], position: int) -> None:
    """An error that the service reports anywhere in the stream is raised, and a partial restore gets no version."""
    frames = [plan(full=False), changed({key(10): b"new"}), END]
    frames.insert(position, frame)
    with pytest.raises(kind):
        advance(table, ScriptedClient(*frames))

    assert (table.version, table.get(key(10))) == ("3.0.u", b"old")


class ForgetfulClient(ScriptedClient):
    """A service that no longer has the changes from an old table to the base, but has the whole base."""

    def restore(
        self, job: str, operator: str, key_groups: KeyGroupRange, from_checkpoint: str | None, to_checkpoint: str
    ) -> Any:
        """Fail for a table with content; send everything to an empty one."""
        if from_checkpoint is None:
            self.frames = (plan(full=True), changed({key(12): b"all"}), END)
        return super().restore(job, operator, key_groups, from_checkpoint, to_checkpoint)


def test_old_table_is_rebuilt_where_the_difference_is_gone(table: StateTable) -> None:
    """If the changes since a table's version were deleted with subsumed checkpoints, the restore is a full one."""
    client = ForgetfulClient(plan(full=False), changed({key(10): b"1"}), ({"kind": "gone"}, b""))

    assert advance(table, client) == 1
    assert client.asked == [("3.0.u", "7.0.u"), (None, "7.0.u")]
    assert (table.version, dict(table.items())) == ("7.0.u", {key(12): b"all"})


class BreakingClient(ScriptedClient):
    """A service whose streams break after some frames, as often as set."""

    def __init__(self, breaks: int, *frames: Frame) -> None:
        super().__init__(*frames)
        self.breaks = breaks

    @contextmanager
    def restore(
        self, job: str, operator: str, key_groups: KeyGroupRange, from_checkpoint: str | None, to_checkpoint: str
    ) -> Iterator[Iterator[Frame]]:
        """Return the frames, or only the first two."""
        self.asked.append((from_checkpoint, to_checkpoint))
        yield iter(self.frames) if len(self.asked) > self.breaks else self._broken()

    def _broken(self) -> Iterator[Frame]:
        yield from self.frames[:2]
        raise UnavailableError("broke off")


def test_broken_stream_is_resumed(table: StateTable) -> None:
    """If a sidecar dies twice during a restore, it is asked a third time, from the table's version."""
    client = BreakingClient(2, plan(full=False), changed({key(10): b"1"}), changed({key(11): b"2"}), END)

    assert advance(table, client) == 2
    assert client.asked == [("3.0.u", "7.0.u")] * 3
    assert (table.version, dict(table.items())) == ("7.0.u", {key(10): b"1", key(11): b"2"})


def test_stream_that_keeps_breaking_is_reported(table: StateTable) -> None:
    """After three broken streams the task fails, and Spark decides where it runs next."""
    client = BreakingClient(9, plan(full=False), changed({key(10): b"1"}), END)
    with pytest.raises(UnavailableError, match="broke off"):
        advance(table, client)

    assert len(client.asked) == 3
    assert (table.version, table.get(key(10))) == ("3.0.u", b"old")


@pytest.mark.parametrize("until", [None, Deadline(1.0)])
def test_local_disk_is_not_tried_again(
    table: StateTable, monkeypatch: pytest.MonkeyPatch, until: Deadline | None
) -> None:
    """I16: an error of the local disk is not retried, nor taken for a slow restore: another folder may work."""

    def fail(*_: Any) -> int:
        raise LocalDiskError("full")

    monkeypatch.setattr(StateTable, "advance_columns", fail)
    client = ScriptedClient(plan(full=False), changed({key(10): b"1"}), END)
    with pytest.raises(LocalDiskError):
        advance_to_base(table, client, "job", "op", GROUPS, BASE, until)  # type: ignore[arg-type]

    assert len(client.asked) == 1


def test_broken_full_restore_has_no_version(table: StateTable) -> None:
    """A table that was emptied for a restore that then broke has no version."""
    error = ({"kind": "error", "error": {"kind": "unavailable", "message": "away"}}, b"")
    with pytest.raises(UnavailableError):
        advance(table, ScriptedClient(plan(full=True), changed({key(10): b"new"}), error))

    assert (table.version, dict(table.items())) == (None, {})
    assert advance(table, ScriptedClient(plan(full=True), changed({key(10): b"new"}), END)) == 1


def snapshot_frames(path: Path, first: int, last: int, counted: list[list[int]], version: str = "5.0.u") -> list[Frame]:
    """Return the frames of a snapshot of a table with one key in each of its key groups."""
    source = StateTable.open(path)
    source.advance([(key(group), b"snapshot") for group in range(first, last + 1)], version)
    with source.making_snapshot() as folder:
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
    source.close()
    header = {"kind": "snapshot", "index": "the.index", "version": version, "first": first, "last": last}
    frames: list[Frame] = [({**header, "counted": counted, "files": len(files)}, b"")]
    for name, data in files.items():
        place = {"kind": "file", "name": name, "object": f"{name}.object", "offset": 0, "file_size": len(data)}
        frames.append(({**place, "checksum": checksum128(data)}, data))
    return frames


def full(snapshots: int) -> Frame:
    """Return the first frame of a restore from snapshots."""
    return {"kind": "plan", "full": True, "snapshots": snapshots}, b""


def test_own_snapshot_becomes_the_table(table: StateTable, tmp_path: Path) -> None:
    """A snapshot of exactly the table's key groups is adopted as it is; only the log after it counts as changes."""
    frames = snapshot_frames(tmp_path / "source", 10, 19, [[10, 19]])
    count = advance(table, ScriptedClient(full(1), *frames, changed({key(10): b"new", key(11): None}), END))

    expected = {key(group): b"snapshot" for group in range(12, 20)} | {key(10): b"new"}
    assert (count, table.version, dict(table.items())) == (2, "7.0.u", expected)


def test_file_that_is_not_here_comes_as_bytes(table: StateTable, tmp_path: Path) -> None:
    """I16: if a file cannot be taken from this host's disk, the snapshot is asked for again, as bytes."""
    frames = snapshot_frames(tmp_path / "source", 10, 19, [[10, 19]])

    class Naming(ScriptedClient):
        takes_files = True

        @contextmanager
        def restore(self, *arguments: Any) -> Iterator[Iterator[Frame]]:
            self.asked.append(arguments[-2:])
            named = [({**header, "path": str(tmp_path / "gone")}, b"") for header, _ in frames[1:]]
            yield iter([full(1), frames[0], *(named if self.takes_files else frames[1:]), END])

    client = Naming()
    advance(table, client)
    assert client.asked == [("3.0.u", "7.0.u"), (None, "7.0.u")]
    assert (table.version, dict(table.items())) == ("7.0.u", {key(group): b"snapshot" for group in range(10, 20)})


def test_key_groups_are_copied_out_of_other_snapshots(table: StateTable, tmp_path: Path) -> None:
    """I14: from snapshots of other key groups, exactly the needed ones are copied, before the log."""
    frames = [
        *snapshot_frames(tmp_path / "one", 0, 14, [[10, 11], [14, 14]]),
        *snapshot_frames(tmp_path / "two", 12, 30, [[12, 13], [15, 19]]),
    ]
    advance(table, ScriptedClient(full(2), *frames, changed({key(12): b"new"}), END))

    assert dict(table.items()) == {key(group): b"snapshot" for group in range(10, 20)} | {key(12): b"new"}
    assert table.version == "7.0.u"


def test_wider_snapshot_is_not_taken_as_it_is(table: StateTable, tmp_path: Path) -> None:
    """I14: a snapshot with more than the table's key groups leaves nothing of the others in the table."""
    advance(table, ScriptedClient(full(1), *snapshot_frames(tmp_path / "source", 0, 30, [[10, 19]]), END))

    assert list(dict(table.items())) == [key(group) for group in range(10, 20)]


def test_segment_counts_for_its_key_groups_only(table: StateTable) -> None:
    """I14: from a set that a materialization replaces in part, only the other key groups are applied."""
    header, payload = changed({key(group): b"x" for group in range(10, 20)})
    advance(table, ScriptedClient(plan(full=True), ({**header, "counted": [[11, 12], [18, 19]]}, payload), END))

    assert list(dict(table.items())) == [key(11), key(12), key(18), key(19)]


@pytest.mark.parametrize("last", [19, 30])
@pytest.mark.parametrize("position", [1, 2, 3])
def test_error_within_snapshot_is_raised(table: StateTable, tmp_path: Path, last: int, position: int) -> None:
    """I10: an error within a snapshot is raised; the table keeps nothing of it, and no file stays beside it."""
    frames = [full(1), *snapshot_frames(tmp_path / "source", 10, last, [[10, 19]]), END]
    frames.insert(position, ({"kind": "error", "error": {"kind": "corrupt_data", "message": "bad 8.sst"}}, b""))
    with pytest.raises(CorruptDataError, match=r"8\.sst"):
        advance(table, ScriptedClient(*frames))

    assert (table.version, dict(table.items())) == (None, {})
    assert not list(tmp_path.glob("*.incoming"))


def test_broken_log_after_snapshot_resumes_from_it(table: StateTable, tmp_path: Path) -> None:
    """A stream that breaks after the snapshot is resumed from the snapshot's version, without the snapshot."""

    class Breaking(ScriptedClient):
        @contextmanager
        def restore(self, *arguments: Any) -> Iterator[Iterator[Frame]]:
            self.asked.append(arguments[-2:])
            yield self._first() if len(self.asked) == 1 else iter([plan(full=False), changed({key(10): b"new"}), END])

        def _first(self) -> Iterator[Frame]:
            yield full(1)
            yield from snapshot_frames(tmp_path / "source", 10, 19, [[10, 19]])
            raise UnavailableError("broke off")

    client = Breaking()
    assert advance(table, client) == 1
    assert client.asked == [("3.0.u", "7.0.u"), ("5.0.u", "7.0.u")]
    assert table.get(key(10)) == b"new"
    assert table.get(key(11)) == b"snapshot"


def test_task_hears_of_snapshots(table: StateTable) -> None:
    """I13: the plan tells the task whether to make a snapshot and which stored one to report, or neither."""
    told = {"kind": "plan", "full": False, "materialize": True, "materialized": {"uid": "m"}}
    # A scripted client.
    advanced = advance_to_base(table, ScriptedClient((told, b""), END), "job", "op", GROUPS, BASE)  # type: ignore[arg-type]
    assert (advanced.materialize, advanced.materialized) == (True, {"uid": "m"})

    # A scripted client.
    again = advance_to_base(table, ScriptedClient(), "job", "op", GROUPS, BASE)  # type: ignore[arg-type]
    assert (again.materialize, again.materialized) == (False, None)


class ReadingClient:
    """A service that returns change sets and breaks every stream after the first one."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    @contextmanager
    def read(self, job: str, epoch: int, refs: list[int]) -> Iterator[Iterator[Frame]]:
        """Return the first requested set."""
        self.asked.append(len(refs))
        yield self._frames(refs)

    def _frames(self, refs: list[int]) -> Iterator[Frame]:
        yield changed({key(10): b"%d" % refs[0]})
        if len(refs) > 1:
            raise UnavailableError("the service broke off a stream")
        yield END


def test_change_sets_are_read_one_at_a_time() -> None:
    """Sets received before a stream broke were already handed on, and are not requested again."""
    client = ReadingClient()
    parts = read_change_sets(client, "job", 1, [1, 2, 3])  # type: ignore[arg-type, list-item]  # stand-ins

    assert next(iter(parts)).values.to_pylist() == [b"1"]
    assert client.asked == [3]
    assert [part.values.to_pylist() for part in parts] == [[b"2"], [b"3"]]
    assert client.asked == [3, 2, 1]
