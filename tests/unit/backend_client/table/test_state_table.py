"""The local table: its content, and the version it reports."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backend_client.table import state_table
from backend_client.table.journal import BYTES_MAX
from backend_client.table.local_disk import LocalDiskError, is_damage
from backend_client.table.state_table import StateTable
from backend_client.table.writes import write
from storage.change_set import ChangeColumns, in_columns
from storage.errors import CorruptDataError, UnavailableError

MANY = 120_000


def many(value: bytes, stop_at: int = MANY, count: int = MANY) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield changes of many keys, and fail at one of them."""
    for number in range(count):
        if number == stop_at:
            raise CorruptDataError("the stream broke off")
        yield number.to_bytes(4, "big"), value


def content(table: StateTable) -> dict[bytes, bytes]:
    """Return the content of a table."""
    return dict(table.items())


def test_new_table_has_no_version(tmp_path: Path) -> None:
    """A new table is empty and has no version."""
    table = StateTable.open(tmp_path)

    assert (table.version, content(table)) == (None, {})
    table.close()


def test_all_files_have_a_filter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absent keys are not searched for: files of a table that was opened again have a Bloom filter, too."""
    monkeypatch.setattr(state_table, "CHANGES_MAX", 10)
    for number in range(3):
        table = StateTable.open(tmp_path)
        table.advance(((f"{number}-{at}".encode(), b"x") for at in range(11)), f"{number}.0.u")
        table.close()

    files = list(tmp_path.rglob("*.sst"))
    assert files
    assert all(b"fullfilter.rocksdb.BuiltinBloomFilter" in file.read_bytes() for file in files)


def test_last_change_of_a_key_is_found_in_any_part(tmp_path: Path) -> None:
    """Look-ups of many keys find the newest change, deletions among them, and what only the table has."""
    table = StateTable.open(tmp_path)
    table.advance([(b"a", b"1"), (b"b", b"1"), (b"c", b"1"), (b"d", b"1")], "0.0.u")
    table.overlay(list(in_columns([(b"a", b"2"), (b"b", b"2"), (b"c", b"2")])))
    table.overlay(list(in_columns([(b"b", None), (b"c", b"3"), (b"e", b"3")])))
    keys = pa.array([b"e", b"d", b"c", b"b", b"a", b"f"], pa.binary())
    assert table.get_many(keys, 1.0).to_pylist() == [b"3", b"1", b"3", None, b"2", None]
    table.close()


def test_changes_that_lie_over_a_table(tmp_path: Path) -> None:
    """I1: changes laid over a table are seen by every way of reading, and are gone when it is closed."""
    for _ in range(2):  # once opened for writing, once opened read-only
        table = StateTable.open(tmp_path)
        if table.version is None:
            table.advance([(b"a1", b"old"), (b"a2", b"gone"), (b"b1", b"kept")], "0.0.u")
        table.overlay(list(in_columns([(b"a1", b"new"), (b"a2", None)])))
        table.overlay(list(in_columns([(b"a1", b"newer"), (b"a3", b"more")])))

        assert [table.get(key) for key in (b"a1", b"a2", b"b1")] == [b"newer", None, b"kept"]
        assert list(table.scan(b"a")) == [(b"a1", b"newer"), (b"a3", b"more")]
        assert list(table.between([(b"a2", b"c")])) == [(b"a3", b"more"), (b"b1", b"kept")]
        keys = pa.array([b"a1", b"a2", b"b1"], pa.binary())
        assert table.get_many(keys, 1.0).to_pylist() == [b"newer", None, b"kept"]
        table.close()
        table = StateTable.open(tmp_path)
        assert (table.version, table.get(b"a1"), table.get(b"a3")) == ("0.0.u", b"old", None)
        table.close()


def guests(count: int, rows: int) -> Iterator[ChangeColumns]:
    """Yield `count` chunks of `rows` 4 KB changes; each chunk deletes one key of the table and changes another."""
    for first in range(0, count * rows, rows):
        keys = [b"new" + number.to_bytes(4, "big") for number in range(first, first + rows)]
        values = [bytes(4 << 10)] * rows
        yield ChangeColumns(
            pa.array([b"a1", b"a2", *keys], pa.binary()), pa.array([b"%d" % first, None, *values], pa.binary())
        )


@pytest.mark.parametrize("is_written", [True, False])
def test_many_changes_over_a_table_do_not_stay_in_memory(tmp_path: Path, is_written: bool) -> None:
    """I1, I9: however many changes are laid over a table, few are in memory, and none is left when it is closed."""
    table = StateTable.open(tmp_path)
    table.advance([(b"a1", b"old"), (b"a2", b"gone"), (b"b1", b"kept")], "0.0.u")
    if not is_written:
        table.close()
        table = StateTable.open(tmp_path)
        table.advance([(b"b2", b"in the journal")], "1.0.u")
    before, most = pa.total_allocated_bytes(), 0

    def parts() -> Iterator[ChangeColumns]:
        nonlocal most
        for part in guests(60, 250):
            most = max(most, pa.total_allocated_bytes() - before)
            yield part

    table.overlay(parts())
    table.overlay(list(in_columns([(b"b1", b"newest")])))

    assert most <= BYTES_MAX + (8 << 20)
    assert [table.get(key) for key in (b"a1", b"a2", b"b1")] == [b"14750", None, b"newest"]
    assert table.get(b"b2") == (None if is_written else b"in the journal")
    assert sum(1 for _ in table.scan(b"new")) == 15_000
    keys = pa.array([b"a1", b"a2", b"b1"], pa.binary())
    assert table.get_many(keys, 1.0).to_pylist() == [b"14750", None, b"newest"]
    table.close()
    table = StateTable.open(tmp_path)
    assert table.version == ("0.0.u" if is_written else "1.0.u")
    assert [table.get(key) for key in (b"a1", b"a2", b"b1")] == [b"old", b"gone", b"kept"]
    assert list(table.scan(b"new")) == []
    table.close()
    assert list(tmp_path.glob("*.snapshot-*")) == []


@pytest.mark.parametrize("writes", [0, 1, 30])
def test_changes_over_a_table_stay_in_memory_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """I16: changes that the copy cannot hold, from its first write or a later one on, are still read in order."""
    left = iter(range(writes))

    def full(table: Any, parts: Iterable[ChangeColumns], version: str) -> int:
        if next(left, None) is None:
            raise Exception("IO error: No space left on device")  # noqa: TRY002 - as rocksdict does
        return write(table, parts, version)

    with closing(StateTable.open(tmp_path)) as table:
        table.advance([(b"a1", b"old"), (b"a2", b"gone"), (b"b1", b"kept")], "0.0.u")
        monkeypatch.setattr(state_table, "write", full)
        table.overlay(guests(60, 250))

        assert [table.get(key) for key in (b"a1", b"a2", b"b1")] == [b"14750", None, b"kept"]
        assert sum(1 for _ in table.scan(b"new")) == 15_000


def test_table_is_closed_to_other_users(tmp_path: Path) -> None:
    """Only its own user may read the folder of a job's tables."""
    StateTable.open(tmp_path / "job").close()

    assert (tmp_path / "job").stat().st_mode & 0o777 == 0o700


def test_advanced_table_is_kept(tmp_path: Path) -> None:
    """Changes and version persist after the table is closed; the last change of a key counts."""
    table = StateTable.open(tmp_path)
    assert table.advance([(b"a", b"1"), (b"b", b"2"), (b"a", None), (b"b", b"3")], "0.0.u") == 2
    table.close()
    table = StateTable.open(tmp_path)

    assert (table.version, content(table), table.get(b"b"), table.get(b"a")) == ("0.0.u", {b"b": b"3"}, b"3", None)
    table.close()


@pytest.mark.parametrize("count", [49_999, 50_000, 50_001, 100_000])
def test_large_advance_is_complete(tmp_path: Path, count: int) -> None:
    """Changes that need several writes are all written, and the version after them."""
    table = StateTable.open(tmp_path)
    assert table.advance(many(b"x", count=count), "1.0.u") == count

    assert (table.version, len(content(table))) == ("1.0.u", count)
    table.close()


@pytest.mark.parametrize("stop_at", [0, 10, 49_999, 50_000, 60_000, 119_999])
def test_broken_advance_keeps_no_version(tmp_path: Path, stop_at: int) -> None:
    """I1: an advance that fails leaves the old content at the old version, or no version."""
    table = StateTable.open(tmp_path)
    table.advance(many(b"old"), "1.0.u")
    with pytest.raises(CorruptDataError):
        table.advance(many(b"new", stop_at), "2.0.u")
    table.close()
    table = StateTable.open(tmp_path)

    assert table.version in (None, "1.0.u")
    assert table.version is None or set(content(table).values()) == {b"old"}
    table.close()


@pytest.mark.parametrize(("stop_at", "version"), [(50_000, "1.0.u"), (60_000, None), (119_999, None)])
def test_advance_that_breaks_between_writes_has_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int, version: str | None
) -> None:
    """I1: after the first of several writes, the table has no version until all of them are done."""
    monkeypatch.setattr("backend_client.table.writes._WRITE_BYTES", 10_000)
    monkeypatch.setattr(state_table, "CHANGES_MAX", 1000)
    table = StateTable.open(tmp_path)
    table.advance(many(b"old"), "1.0.u")
    assert (table.version, len(content(table))) == ("1.0.u", MANY)
    with pytest.raises(CorruptDataError):
        table.advance(many(b"new", stop_at), "2.0.u")
    table.close()
    table = StateTable.open(tmp_path)

    assert table.version == version
    table.close()


@pytest.mark.parametrize("rows", [20, 2000])
def test_long_values_do_not_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """A restore bounds changes in memory by bytes, not only by number, and creates few Python objects at once."""
    before, most, largest = pa.total_allocated_bytes(), 0, 0
    pairs = ChangeColumns.pairs

    def parts() -> Iterator[ChangeColumns]:
        nonlocal most
        for first in range(0, 4000, rows):
            keys = pa.array([number.to_bytes(4, "big") for number in range(first, first + rows)], pa.binary())
            yield ChangeColumns(keys, pa.array([bytes(32 << 10)] * rows, pa.binary()))
            most = max(most, pa.total_allocated_bytes() - before)

    def measured(part: ChangeColumns) -> Iterator[tuple[bytes, bytes | None]]:
        nonlocal largest
        largest = max(largest, part.keys.nbytes + part.values.nbytes)
        return pairs(part)

    monkeypatch.setattr(ChangeColumns, "pairs", measured)
    part_bytes = rows * (33 << 10) * 2  # Arrow's builders use up to twice the space
    with closing(StateTable.open(tmp_path)) as table:
        assert table.advance_columns(parts(), "1.0.u") == 4000
        assert most <= BYTES_MAX + 2 * part_bytes
        assert largest <= 5 << 20
        assert pa.total_allocated_bytes() - before <= BYTES_MAX + part_bytes
        assert len(table._journal) == 0

        assert table.get((3999).to_bytes(4, "big")) == bytes(32 << 10)
        assert table.version == "1.0.u"


KILLED = """
import os, signal, sys
from backend_client.table.state_table import StateTable
table = StateTable.open(sys.argv[1])
def changes():
    for number in range(400_000):
        if number == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        yield number.to_bytes(4, "big"), os.urandom(100)
table.advance(changes(), "2.0.u")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("stop_at", [10, 130_000, 390_000, 400_000])
def test_killed_advance_keeps_old_or_no_version(tmp_path: Path, stop_at: int) -> None:
    """I1: a process killed while it advances leaves a table with a correct version or none; its slot is free."""
    table = StateTable.open(tmp_path)
    table.advance(many(b"old", count=1000), "1.0.u")
    table.close()
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(stop_at)], check=False)
    assert killed.returncode == -9
    table = StateTable.open(tmp_path)

    assert table._folder == tmp_path / "0"
    assert table.version in (None, "1.0.u", "2.0.u")
    if table.version == "1.0.u":
        assert content(table) == dict(many(b"old", count=1000))
    if table.version == "2.0.u":
        assert len(content(table)) == 400_000
    table.close()


def test_second_user_gets_another_slot(tmp_path: Path) -> None:
    """A table in use stays with its task; another task of the same key groups gets its own table."""
    first = StateTable.open(tmp_path)
    first.advance([(b"a", b"1")], "1.0.u")
    second = StateTable.open(tmp_path)
    assert [table.version for table in (first, second)] == ["1.0.u", None]
    second.advance([(b"a", b"2")], "2.0.u")
    first.close()
    again = StateTable.open(tmp_path)

    assert (again.version, second.version) == ("1.0.u", "2.0.u")
    again.close()
    second.close()


def test_taken_slots_are_an_error(tmp_path: Path) -> None:
    """If a range has more tasks than slots, the error names the folder."""
    tables = [StateTable.open(tmp_path) for _ in range(16)]
    with pytest.raises(UnavailableError, match="16 table slots"):
        StateTable.open(tmp_path)
    for table in tables:
        table.close()


@pytest.mark.parametrize("name", ["CURRENT", "MANIFEST-*", "*.sst"])
@pytest.mark.parametrize("damage", ["delete", "garble"])
def test_damaged_table_is_thrown_away(tmp_path: Path, name: str, damage: str) -> None:
    """I16: a table with damaged files is replaced by an empty one; it never stops a task."""
    table = StateTable.open(tmp_path)
    table.advance(many(b"x", count=60_000), "1.0.u")
    table.close()
    files = list((tmp_path / "0").glob(name))
    assert files
    for path in files:
        path.unlink() if damage == "delete" else path.write_bytes(b"garbage" * 10)
    table = StateTable.open(tmp_path)

    assert (table.version, content(table)) == (None, {})
    assert table.advance([(b"a", b"1")], "2.0.u") == 1
    table.close()


def test_damaged_block_is_thrown_away(tmp_path: Path) -> None:
    """I16: damage found only when a block is read costs one attempt; the next one starts with an empty table."""
    table = StateTable.open(tmp_path)
    table.advance(((number.to_bytes(4, "big"), os.urandom(100)) for number in range(60_000)), "1.0.u")
    table.close()
    for path in (tmp_path / "0").glob("*.sst"):
        data = bytearray(path.read_bytes())
        data[len(data) // 4 : len(data) // 4 + 4096] = b"?" * 4096
        path.write_bytes(data)
    failures = [0, 0]
    for attempt in range(2):
        table = StateTable.open(tmp_path)
        for number in range(0, 60_000, 10):
            try:
                table.get(number.to_bytes(4, "big"))
            except Exception:  # noqa: BLE001 - the type that rocksdict raises
                failures[attempt] += 1
        if failures[attempt]:
            table.discard()
        table.close()

    assert failures[1] == 0


def test_damage_that_ends_all_snapshots_is_thrown_away(tmp_path: Path) -> None:
    """I13, I16: a table that RocksDB cannot compact any more gives no snapshot; it serves its task and is removed."""
    table = StateTable.open(tmp_path)
    for version in ("1.0.u", "2.0.u"):
        table.advance(((number.to_bytes(4, "big"), os.urandom(100)) for number in range(30_000)), version)
        with table.making_snapshot():
            pass
    for path in (tmp_path / "0").glob("*.sst"):
        data = bytearray(path.read_bytes())
        data[len(data) // 4] ^= 1
        path.write_bytes(data)
    table.advance([(b"key", b"value")], "3.0.u")
    table._table.compact_range(None, None)

    with pytest.raises(LocalDiskError, match="Corruption"), table.making_snapshot():
        pass
    assert table.get(b"key") == b"value"
    table.close()
    table = StateTable.open(tmp_path)
    assert (table.version, content(table)) == (None, {})
    table.close()


@pytest.mark.parametrize("read", ["get", "items", "scan", "between", "get_many"])
def test_damage_is_an_error_for_every_read(tmp_path: Path, read: str) -> None:
    """I10: unreadable data never counts as missing, also in reads that go from key to key."""
    keys = [number.to_bytes(4, "big") for number in range(60_000)]
    table = StateTable.open(tmp_path)
    table.advance(((key, os.urandom(100)) for key in keys), "1.0.u")
    table.close()
    for path in (tmp_path / "0").glob("*.sst"):
        data = bytearray(path.read_bytes())
        data[len(data) // 4 : len(data) // 4 + 8192] = b"?" * 8192
        path.write_bytes(data)
    table = StateTable.open(tmp_path)

    with pytest.raises(Exception, match=r"^Corruption: ") as raised:
        if read == "get":
            list(map(table.get, keys))
        elif read == "items":
            list(table.items())
        elif read == "scan":
            list(table.scan(b"\x00\x00"))
        elif read == "between":
            list(table.between([(keys[100], keys[-100])]))
        else:
            table.get_many(pa.array(keys, pa.binary()), 1.0)
    table.close()

    assert is_damage(raised.value)


@pytest.mark.parametrize(
    "error", [Exception("the user's own"), ValueError("Corruption: of a value"), UnavailableError("no sidecar")]
)
def test_other_errors_are_no_damage(error: Exception) -> None:
    """A table is discarded for RocksDB's errors about its files, not for errors of a user's function."""
    assert not is_damage(error)


def test_large_commit_is_read_over_what_memory_holds(tmp_path: Path) -> None:
    """After a small commit, whose changes stay in memory, every way of reading finds the values of a large one."""
    small, large = b"small", b"x" * (BYTES_MAX // 1000 + 1)
    keys = [number.to_bytes(4, "big") for number in range(1000)]
    table = StateTable.open(tmp_path)
    table.advance([(key, small) for key in keys], "0.0.u")
    assert table.get(keys[7]) == small

    table.advance([(key, large) for key in keys], "1.0.u")

    assert table.get(keys[7]) == large
    assert set(content(table).values()) == {large}
    assert set(table.get_many(pa.array(keys, pa.binary()), 1.0).to_pylist()) == {large}
    table.close()


def test_cleared_table_is_empty(tmp_path: Path) -> None:
    """Clearing removes content and version, and the table remains usable."""
    table = StateTable.open(tmp_path)
    table.advance([(b"a", b"1")], "1.0.u")
    table.clear()
    assert (table.version, content(table), table.get(b"a")) == (None, {}, None)
    table.advance([(b"b", b"2")], "2.0.u")

    assert table.get(b"b") == b"2"
    table.close()


def test_unusable_folder_is_named(tmp_path: Path) -> None:
    """For a folder that cannot hold tables, the error names the setting to change."""
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")

    with pytest.raises(UnavailableError, match="local_dir"):
        StateTable.open(blocked / "tables")


@pytest.mark.parametrize("asked", [[b"k-0007", b"k-0003", b"none", b"k-0007"], [b"k-0001"], [b"a", b"z"]])
@pytest.mark.parametrize("entries", [10, 5000])
def test_many_values_are_read_at_once(tmp_path: Path, entries: int, asked: list[bytes]) -> None:
    """By one scan or by look-ups, each key gets its value, in order; a missing key gets none."""
    stored = {f"k-{number:04}".encode(): str(number).encode() for number in range(entries)}
    with closing(StateTable.open(tmp_path / "table")) as table:
        table.advance(stored.items(), "1.0")

        found = table.get_many(pa.array(asked, pa.binary()), 1.0)
        assert found.to_pylist() == [stored.get(key) for key in asked]
        assert list(table.between([(b"k-0002", b"k-0005")])) == [
            (b"k-0002", b"2"),
            (b"k-0003", b"3"),
            (b"k-0004", b"4"),
        ]


def test_values_are_read_after_reopening(tmp_path: Path) -> None:
    """Values in files are read like values in memory, also for keys written several times."""
    for version in range(4):
        changes = [(f"k-{number:04}".encode(), str(version).encode()) for number in range(version, 100)]
        with closing(StateTable.open(tmp_path / "table")) as table:
            table.advance(changes, f"{version}.0")
    with closing(StateTable.open(tmp_path / "table")) as table:
        keys = [f"k-{number:04}".encode() for number in range(100)]
        found = table.get_many(pa.array(keys, pa.binary()), 1.0)
        assert found.to_pylist() == [str(min(number, 3)).encode() for number in range(100)]
