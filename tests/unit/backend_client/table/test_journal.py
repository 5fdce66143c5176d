"""Tables with their newest changes in a journal: the content is the same after reopening, failures and damage."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_client.table import journal
from backend_client.table.journal import BYTES_MAX, CHANGES_MAX, RECORDS_MAX
from backend_client.table.snapshot import VERSION_KEY
from backend_client.table.state_table import StateTable
from storage.change_set import ChangeColumns

SMALL = {f"k-{number:03}".encode(): b"0" for number in range(100)}


def advanced(folder: Path, number: int, changes: dict[bytes, bytes | None]) -> bool:
    """Open a table, advance it to a version, and close it; return whether it was opened read-only."""
    with closing(StateTable.open(folder)) as table:
        table.advance(changes.items(), f"{number}.0.u")
        assert table.version == f"{number}.0.u"
        return not table._is_writable


def content(folder: Path) -> tuple[str | None, dict[bytes, bytes]]:
    with closing(StateTable.open(folder)) as table:
        return table.version, dict(table.items())


def test_small_batches_are_not_written_to_the_table(tmp_path: Path) -> None:
    """From the second small batch on, a table is opened read-only, and it has all changes each time."""
    expected: dict[bytes, bytes] = {}
    read_only = []
    for number in range(30):
        changes = {f"k-{(number * 40 + at) % 500:03}".encode(): str(number).encode() for at in range(100)}
        expected |= changes
        read_only.append(advanced(tmp_path, number, dict(changes)))
        assert content(tmp_path) == (f"{number}.0.u", expected)
    assert not read_only[0]
    assert all(read_only[1:6])
    # The journal is bounded: eventually the table gets its changes.
    assert read_only.count(False) == 1 + 29 // (RECORDS_MAX + 1)


@pytest.fixture(params=[(1, 1), (3, 1000), (4096, 100)], scope="module")
def layered(request: pytest.FixtureRequest) -> Iterator[None]:
    """Divide the changes into small and large layers, which are searched as columns or as dictionaries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "_LAYER_CHANGES_MIN", request.param[0])
        patch.setattr(journal, "_CHANGES_PER_LOOK_UP", request.param[1])
        yield


@settings(max_examples=25)
@given(
    st.lists(
        st.dictionaries(st.binary(max_size=2), st.none() | st.binary(max_size=2), max_size=6), min_size=2, max_size=5
    ),
    st.binary(max_size=2),
    st.binary(max_size=2),
)
def test_reads_see_the_journal(
    layered: None,
    tmp_path_factory: pytest.TempPathFactory,
    batches: list[dict[bytes, bytes | None]],
    low: bytes,
    high: bytes,
) -> None:
    """I14: single reads, multi-key reads and scans see the same as a plain dictionary, including deletions."""
    folder = tmp_path_factory.mktemp("table")
    expected: dict[bytes, bytes] = {}
    for number, changes in enumerate(batches):
        advanced(folder, number, changes)
        for key, value in changes.items():
            expected.pop(key, None)
            if value is not None:
                expected[key] = value
    keys = sorted({key for changes in batches for key in changes} | {low, high})
    with closing(StateTable.open(folder)) as table:
        assert not table._is_writable
        assert list(table.items()) == sorted(expected.items())
        for _ in range(3):
            assert list(map(table.get, keys)) == list(map(expected.get, keys))
        for covered in (1.0, 1e9):
            found = table.get_many(pa.array(keys, pa.binary()), covered)
            assert found.to_pylist() == list(map(expected.get, keys))
        shown = {key: value for key, value in table.scan(low) if key != VERSION_KEY}
        assert shown == {key: value for key, value in expected.items() if key.startswith(low)}
        shown = {key: value for key, value in table.between([(low, high)]) if key != VERSION_KEY}
        assert shown == {key: value for key, value in expected.items() if low <= key < high}
    shutil.rmtree(folder)


@pytest.mark.parametrize("large", [CHANGES_MAX, CHANGES_MAX + 100_000])
def test_large_batch_writes_the_table(tmp_path: Path, large: int) -> None:
    """A batch that is too large for the journal is written to the table, after the changes in the journal."""
    advanced(tmp_path, 0, dict(SMALL))
    advanced(tmp_path, 1, {b"k-001": b"1", b"k-002": None})
    many: dict[bytes, bytes | None] = {number.to_bytes(4, "big"): b"2" for number in range(large)}
    many[b"k-003"] = b"2"
    assert not advanced(tmp_path, 2, many)
    assert not advanced(tmp_path, 3, {b"k-004": None})

    version, found = content(tmp_path)
    expected = {**SMALL, **many, b"k-001": b"1"}
    assert version == "3.0.u"
    assert found == {key: value for key, value in expected.items() if key not in (b"k-002", b"k-004")}


def test_repeated_changes_are_written_once(tmp_path: Path) -> None:
    """For keys that many batches change, the table gets the last change, and deletions count."""
    batches = 5 * RECORDS_MAX // 2
    for number in range(batches):
        changes: dict[bytes, bytes | None] = {b"%05d" % key: b"%d" % number for key in range(number, 3000)}
        advanced(tmp_path, number, {**changes, b"gone": None if number % 2 else b"here"})
    expected = {b"%05d" % key: b"%d" % min(key, batches - 1) for key in range(3000)}
    with closing(StateTable.open(tmp_path)) as table:
        assert dict(table.items()) == expected
        table._write_journal()
        assert dict(table.items()) == expected


def test_key_of_journal_and_batch_is_put_once(tmp_path: Path) -> None:
    """If a batch makes the journal too long, RocksDB gets each key's last change, and nothing twice."""
    for number in range(RECORDS_MAX + 1):
        advanced(tmp_path, number, {b"a": b"%d" % number, b"b": b"%d" % number})
    with closing(StateTable.open(tmp_path)) as table:
        opened = table._is_writable
        table.advance([(b"b", b"last"), (b"c", b"last")], "last")
        assert (opened, table._is_writable) == (False, True)
        puts = table._table.property_int_value("rocksdb.num-entries-active-mem-table")
        assert puts == len((b"a", b"b", b"c", VERSION_KEY))
    assert content(tmp_path) == ("last", {b"a": b"%d" % RECORDS_MAX, b"b": b"last", b"c": b"last"})


def test_changes_of_one_write_are_read_from_memory(tmp_path: Path) -> None:
    """Changes are also read from memory after their write, and a rewrite of the table does not change them."""
    with closing(StateTable.open(tmp_path)) as table:
        table.advance([(b"a", b"1"), (b"b", b"1")], "0.0.u")
        assert len(table._journal) == 2
        table.advance([(b"a", None), (b"c", b"2")], "1.0.u")
        assert (table.get(b"a"), table.get(b"b"), table.get(b"c")) == (None, b"1", b"2")
        assert list(table.items()) == [(b"b", b"1"), (b"c", b"2")]
        assert table.version == "1.0.u"
    assert content(tmp_path) == ("1.0.u", {b"b": b"1", b"c": b"2"})


def test_long_values_write_the_table(tmp_path: Path) -> None:
    """The journal is also bounded in bytes."""
    advanced(tmp_path, 0, dict(SMALL))
    assert not advanced(tmp_path, 1, {b"k-001": bytes(BYTES_MAX)})
    assert content(tmp_path)[1][b"k-001"] == bytes(BYTES_MAX)


def test_too_many_bytes_are_not_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes that the journal does not accept are never encoded for it."""
    monkeypatch.setattr(journal, "_record", None)
    log = journal.TableJournal(tmp_path / "journal")
    part = ChangeColumns.of({b"%d" % number: bytes(BYTES_MAX // 3) for number in range(2)})

    assert not log.append([part, part], "0.0.u", "1.0.u")
    assert len(log) == 0


def test_journal_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    """I16: changes that the journal's file does not accept are written to the table, after the journal's changes."""
    advanced(tmp_path, 0, dict(SMALL))
    advanced(tmp_path, 1, {b"k-001": b"1"})
    with closing(StateTable.open(tmp_path)) as table:
        assert not table._is_writable
        (tmp_path / "0" / "journal").unlink()
        table.advance([(b"k-002", b"2")], "2.0.u")
    assert content(tmp_path) == ("2.0.u", {**SMALL, b"k-001": b"1", b"k-002": b"2"})


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_damaged_record_counts_for_nothing(tmp_path: Path, cut: int) -> None:
    """I10, I16: a truncated or damaged record is ignored; the table has the version before it, and advances from it."""
    for number in range(3):
        advanced(tmp_path, number, {b"k": str(number).encode()})
    journal = tmp_path / "0" / "journal"
    data = journal.read_bytes()
    journal.write_bytes(data[:-cut])
    assert content(tmp_path) == ("1.0.u", {b"k": b"1"})
    journal.write_bytes(data[:-cut] + b"?" + data[len(data) - cut + 1 :])
    assert content(tmp_path) == ("1.0.u", {b"k": b"1"})
    assert advanced(tmp_path, 2, {b"k": b"again"})
    assert content(tmp_path) == ("2.0.u", {b"k": b"again"})


def test_journal_of_another_version_counts_for_nothing(tmp_path: Path) -> None:
    """I1: a journal that does not continue the table's version is ignored, as after a crash following a write."""
    for number in range(2):
        advanced(tmp_path, number, {b"k": str(number).encode()})
    journal = tmp_path / "0" / "journal"
    stale = journal.read_bytes()
    with closing(StateTable.open(tmp_path)) as table:
        table._write_journal()
    assert journal.read_bytes() == b""
    journal.write_bytes(stale)

    assert content(tmp_path) == ("1.0.u", {b"k": b"1"})
    advanced(tmp_path, 2, {b"k": b"2"})
    assert content(tmp_path) == ("2.0.u", {b"k": b"2"})


def test_snapshot_has_the_journal(tmp_path: Path) -> None:
    """A snapshot of a table includes its journal; clearing a table clears its journal."""
    advanced(tmp_path, 0, dict(SMALL))
    advanced(tmp_path, 1, {b"k-001": b"1"})
    with closing(StateTable.open(tmp_path)) as table:
        assert not table._is_writable
        with table.making_snapshot() as folder:
            copy = tmp_path / "copy"
            shutil.copytree(folder, copy / "0")
        assert table.version == "1.0.u"
    assert content(copy) == ("1.0.u", {**SMALL, b"k-001": b"1"})
    with closing(StateTable.open(tmp_path)) as table:
        table.clear()
        assert (table.version, table.get(b"k-001"), list(table.items())) == (None, None, [])
    assert content(tmp_path) == (None, {})
