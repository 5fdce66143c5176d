"""
Spark's own checkpoint folder, made for a fork and set back, on a local disk in place of Hadoop's file system.

A failure means that a fork reads rows twice, or that the batches of its output have numbers that Spark's sinks refuse.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from backend_client.spark.start.fork_start import follow
from backend_client.spark.start.spark_checkpoint import CheckpointLog
from dstl_service.wire import CheckpointInfo, CheckpointRef
from storage.errors import ConflictError

OFFSETS = 'v1\n{"batchWatermarkMs":0,"batchTimestampMs":1}\n{"logOffset":2}'


class LocalFiles:
    """The calls of Hadoop's file system that are used here; `gone` is listed, but not there any more."""

    gone: Path | None = None

    def exists(self, path: Path) -> bool:
        return path.exists()

    def listStatus(self, path: Path) -> list[Any]:
        entries = [SimpleNamespace(getName=lambda name=entry.name: name) for entry in path.iterdir()]
        return [SimpleNamespace(getPath=lambda entry=entry: entry) for entry in entries]

    def open(self, path: Path) -> Any:
        if not path.exists() or path == self.gone:
            raise RuntimeError(f"java.io.FileNotFoundException: {path}")
        return SimpleNamespace(readAllBytes=path.read_bytes, close=lambda: None)

    def create(self, path: Path, replace: bool) -> Any:
        if path.exists() and not replace:
            raise RuntimeError(f"org.apache.hadoop.fs.FileAlreadyExistsException: {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = io.BytesIO()
        return SimpleNamespace(write=stream.write, close=lambda: path.write_bytes(stream.getvalue()))

    def delete(self, path: Path, _: bool) -> None:
        path.unlink()

    def rename(self, path: Path, to: Path) -> None:
        path.rename(to)


@pytest.fixture(autouse=True)
def files() -> Iterator[LocalFiles]:
    """Replace Hadoop's file system."""
    found = LocalFiles()
    with mock.patch.multiple(
        "backend_client.spark.start.spark_checkpoint",
        hadoop_folder=lambda _, location: (Path(location), found),
        hadoop_path=lambda _, path, name: path / name,
    ):
        yield found


def checkpoint(folder: Path, **entries: str) -> CheckpointLog:
    """Return a Spark checkpoint with these entries in the log of its first source."""
    for name, text in entries.items():
        path = folder / "sources/0" / name.lstrip("_")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return CheckpointLog(None, str(folder))  # type: ignore[arg-type] # only the file system uses it


def test_batch_whose_entry_was_deleted_is_refused(tmp_path: Path) -> None:
    """A checkpoint without the batch's offsets could not be continued; a driver that sets back deletes them."""
    (tmp_path / "spark/offsets").mkdir(parents=True)
    (tmp_path / "spark/offsets/3").write_text(OFFSETS, encoding="utf-8")
    assert checkpoint(tmp_path / "spark").planned(3) == OFFSETS
    with pytest.raises(ConflictError, match="no entry of batch 4 any more: another driver"):
        checkpoint(tmp_path / "spark").planned(4)


def test_a_note_that_a_crash_cut_off_is_none(files: LocalFiles, tmp_path: Path) -> None:
    """Nobody has seen output then, since it comes after the note."""
    log, notes = checkpoint(tmp_path / "spark"), tmp_path / "spark/dstl-closings"
    assert log.note_closed(7, "base", None, epoch=1) is None
    (notes / "8_1_other").write_text('{"closed_ms', encoding="utf-8")
    assert log.note_closed(8, "other", 6, epoch=2) == 6
    assert log.note_closed(8, "other", 7, epoch=3) == 6
    damaged = RuntimeError("org.apache.hadoop.fs.ChecksumException: x")
    with mock.patch.object(files, "open", side_effect=damaged):
        assert log.note_closed(8, "other", 8, epoch=4) == 8
    no = RuntimeError("no")
    with mock.patch.object(files, "open", side_effect=no), pytest.raises(RuntimeError, match="no"):
        log.note_closed(8, "other", 9, epoch=5)
    with mock.patch.object(files, "create", side_effect=no), pytest.raises(RuntimeError, match="no"):
        log.note_closed(9, "base", 1, epoch=5)


def test_newest_note_of_a_batch_holds(tmp_path: Path) -> None:
    """
    I14: a driver that was suspended before its note, and goes on when another one has emitted, emits the same.

    One that was suspended while it wrote its note replaces no other one; it hears then that the job is another's.
    """
    folder, log = tmp_path / "spark", checkpoint(tmp_path / "spark")
    log.note_closed(6, "before", 1, epoch=1)
    assert log.note_closed(7, "base", 5, epoch=2) == 5
    assert log.note_closed(7, "base", None, epoch=1) == 5
    (folder / "dstl-closings/7_1_base").write_text('{"closed_ms": 8}', encoding="utf-8")
    assert log.note_closed(7, "base", 9, epoch=3) == 5
    assert log.note_closed(7, "another base", 9, epoch=3) == 9
    log.note_closed(8, "next", 6, epoch=2)
    assert {path.name for path in (folder / "dstl-closings").iterdir()} == {"7_3_base", "7_3_another base", "8_2_next"}
    assert log.note_closed(7, "base", 9, epoch=4) == 5
    assert log.note_closed(8, "next", 9, epoch=4) == 6, "those of later batches stay"


def test_a_note_is_written_once(files: LocalFiles, tmp_path: Path) -> None:
    """I14: when the batch is tried again, a crash would cut the note off that its successor needs."""
    log = checkpoint(tmp_path / "spark")
    assert log.note_closed(7, "base", 5, epoch=2) == 5
    with mock.patch.object(files, "create", side_effect=AssertionError("written again")):
        assert log.note_closed(7, "base", 6, epoch=2) == 5


def test_delay_is_that_of_the_newest_driver_before_the_batch(tmp_path: Path) -> None:
    """By epochs: a suspended driver may note a batch that a rewind gave up. Without a note, a former file is read."""
    log = checkpoint(tmp_path / "spark")
    assert log.closing_delay(8) is None
    (tmp_path / "spark").mkdir()
    (tmp_path / "spark/dstl-closed-by").write_text('{"delay_ms": 7000}', encoding="utf-8")
    assert log.closing_delay(8) == 7000
    log.note_closed(4, "base", 1, 0, 2)
    log.note_closed(6, "given up", 1, 5000, 1)
    log.note_closed(6, "of several", 1)
    assert [log.closing_delay(batch) for batch in (8, 5, 4)] == [0, 0, 7000]


@pytest.mark.parametrize("uid", ["first", "second"])
def test_a_rewind_that_was_suspended_deletes_nothing_that_came_after_another(
    files: LocalFiles, tmp_path: Path, uid: str
) -> None:
    """I14: batches planned since then have the same numbers; planned again, a sink that has seen them skips rows."""
    folder, log = tmp_path / "query", checkpoint(tmp_path / "query")
    (folder / "offsets").mkdir(parents=True)
    for number in range(6):
        (folder / "offsets" / str(number)).write_text(OFFSETS, encoding="utf-8")
    delete, deleted = files.delete, []

    def suspended(path: Path, recursive: bool) -> None:
        delete(path, recursive)
        deleted.append(path.name)
        if deleted == ["5"]:
            checkpoint(folder).rewind(3, OFFSETS, uid)
            for number in (4, 5):
                (folder / "offsets" / str(number)).write_text("planned", encoding="utf-8")

    with mock.patch.object(files, "delete", suspended), pytest.raises(ConflictError, match="another driver has set"):
        log.rewind(2, OFFSETS, "first")
    assert (folder / "offsets/4").read_text(encoding="utf-8") == "planned"
    assert log.begins_at(uid)


def test_first_batch_of_a_fork_is_number_0_of_its_sinks(tmp_path: Path) -> None:
    """
    A sink that numbers batches gets 0, 1, … from a fork, whatever the number of Spark's batch.

    Spark's file sink merges its log every ten batches, from all of the ten before, and reads it likewise.
    """
    log = checkpoint(tmp_path / "fork")
    log.fork(7, OFFSETS, "first", None, "origin", None, {})
    assert 8 + log.given_up() == 0
    for number in (8, 9, 10):
        (tmp_path / "fork/offsets" / str(number)).write_text(OFFSETS, encoding="utf-8")
    log.rewind(8, OFFSETS, "back")
    assert 9 + log.given_up() == 3  # 0, 1 and 2 are taken


def test_a_folder_that_is_an_older_copy_is_set_back(tmp_path: Path) -> None:
    """Sinks have output of batches that it does not know, and would leave out those that get their ids."""
    log = checkpoint(tmp_path / "query")
    folder = tmp_path / "query/offsets"
    folder.mkdir(parents=True)
    for number in range(6):
        (folder / str(number)).write_text(OFFSETS, encoding="utf-8")
    nothing: Any = None
    for target, newest in ((4, 9), (3, 4)):
        first = CheckpointRef(target, 0, f"first-{target}")
        latest = CheckpointInfo(
            first, None, 1, 0, "q", OFFSETS, [], 0, 0, rewound_from=CheckpointRef(newest, 0, "newest")
        )
        follow(nothing, log, latest, nothing)
        assert target + 1 + log.given_up() == 10


def test_interrupted_fork_begins_with_number_0_as_well(tmp_path: Path) -> None:
    """A folder in which a fork was begun, and another one then, has had no batch."""
    log = checkpoint(tmp_path / "fork")
    with mock.patch.object(LocalFiles, "rename", side_effect=OSError("died")), pytest.raises(OSError, match="died"):
        log.fork(7, OFFSETS, "first", None, "origin", None, {})
    log.fork(7, OFFSETS, "first", None, "origin", None, {})
    assert 8 + log.given_up() == 0
    (tmp_path / "fork/metadata").unlink()
    log.fork(4, OFFSETS, "second", None, "origin", None, {})
    assert 5 + log.given_up() == 0


def test_entry_that_is_deleted_while_it_is_copied_is_missed(files: LocalFiles, tmp_path: Path) -> None:
    """I14: a fork without a part of its source's log is refused: Spark would not start with it, or read files again."""
    parent = checkpoint(tmp_path / "parent", _0="v1\na", _1="v1\nb", _2="v1\nc", _3="v1\nd")
    fork, files.gone = checkpoint(tmp_path / "fork"), tmp_path / "parent/sources/0/1"
    with pytest.raises(ConflictError, match="no entry 1 in sources/0 any more"):
        fork.fork(7, OFFSETS, "first", None, "origin", parent, {0: 2})
    assert fork.query_id() is None
    assert not fork.is_of_fork("origin")
    files.gone = None
    fork.fork(7, OFFSETS, "first", None, "origin", parent, {0: 2})
    assert fork.is_of_fork("origin")
    assert sorted(path.name for path in (tmp_path / "fork/sources/0").iterdir()) == ["0", "1", "2"]


def test_entry_that_an_interrupted_call_left_empty_is_written_again(tmp_path: Path) -> None:
    """Hadoop makes a file before it has its content; Spark would not start with an empty entry."""
    log = checkpoint(tmp_path / "query")
    log.rewind(7, OFFSETS, "first")
    empty = [tmp_path / "query" / name for name in ("commits/6", "commits/7", "offsets/6")]
    for path in empty:
        path.write_text("", encoding="utf-8")
    log.rewind(7, OFFSETS, "second")
    assert all(path.read_text(encoding="utf-8") for path in empty)
