"""Publishing Parquet files: what a reader that lists the folder sees, on a disk and on a real S3 server."""

from __future__ import annotations

import errno
import io
import math
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend_client.sinks import parquet
from backend_client.sinks.parquet import ParquetSink
from backend_client.sinks.protocol import Marker, Slot
from dstl_service.wire import BRANCH_GENERATIONS, CheckpointRef
from storage.errors import CorruptDataError, FencedError, InvalidInputError, NotFoundError, UnavailableError
from storage.local_store import LocalStore
from storage.object_store import ObjectData, ObjectStore
from storage.open import open_store
from tests.waiting import wait_until
from tools.servers.s3_server import S3Server

SPAWN = multiprocessing.get_context("spawn")
pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

COLUMNS = pa.schema({"k": pa.string(), "v": pa.int64()})
SLOT = Slot("job", "uid", "out", 1, COLUMNS)
ENTRIES = "_dstl/out-uid-00001-"


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        server.create_bucket("bucket")
        yield server


@pytest.fixture(params=["disk", "s3"])
def sink(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ParquetSink:
    """A sink in an empty folder."""
    if request.param == "disk":
        return ParquetSink((tmp_path / "out folder").as_uri())
    for name, value in request.getfixturevalue("s3").env().items():
        monkeypatch.setenv(name, value)
    return ParquetSink(f"s3://bucket/{tmp_path.name}/out")


class CountingStore:
    """A store that counts the calls of its methods, and does something once before one of them."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.url = store.url
        self.calls = Counter[str]()
        self.before: dict[str, Callable[[], None]] = {}

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls[name] += name != "close"
            self.calls += Counter()
            self.before.pop(name, lambda: None)()
            return method(*arguments, **options)

        return counted


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[CountingStore]:
    """The stores that sinks have opened, in order."""
    opened: list[CountingStore] = []

    def counting(path: str, **options: Any) -> CountingStore:
        opened.append(CountingStore(open_store(path, **options)))
        return opened[-1]

    monkeypatch.setattr(parquet, "open_store", counting)
    return opened


def marker(checkpoint_id: int, branch: int = 0) -> Marker:
    return Marker("uid", 1, CheckpointRef(checkpoint_id, branch * BRANCH_GENERATIONS, f"m{checkpoint_id}"))


def batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"k": [str(value) for value in values], "v": list(values)}, schema=COLUMNS)


def publish(sink: ParquetSink, checkpoint_id: int, *values: int, branch: int = 0) -> None:
    publisher = sink.open(SLOT)
    publisher.publish([batch(*values)] if values else [], marker(checkpoint_id, branch))
    publisher.close()


def last(sink: ParquetSink) -> Marker | None:
    publisher = sink.open(SLOT)
    try:
        return publisher.last_published()
    finally:
        publisher.close()


def names(sink: ParquetSink) -> list[str]:
    """Return the objects that a reader which lists the folder takes for data."""
    store = open_store(sink.path)
    return [info.key for info in store.list("") if not info.key.startswith(("_", "."))]


def seen(sink: ParquetSink) -> list[int]:
    """Return the values in all files that a reader sees."""
    store = open_store(sink.path)
    assert all(name.endswith(".parquet") for name in names(sink))
    return [value for name in names(sink) for value in pq.read_table(io.BytesIO(store.get(name)))["v"].to_pylist()]


def test_each_checkpoint_is_one_file_with_its_marker(sink: ParquetSink) -> None:
    """Records in order; a checkpoint without records replaces the marker, and makes a file if it begins a branch."""
    sink.check(COLUMNS, [SLOT])
    assert (last(sink), seen(sink)) == (None, [])
    publish(sink, 0, 1, 2)
    publish(sink, 1)
    assert (last(sink), len(names(sink))) == (marker(1), 1)
    publish(sink, 2, 3)
    assert (last(sink), seen(sink)) == (marker(2), [1, 2, 3])
    publish(sink, 1, branch=7)
    assert (last(sink), seen(sink), len(names(sink))) == (marker(1, 7), [1, 2, 3], 3)


def test_an_older_publisher_is_fenced(sink: ParquetSink) -> None:
    """A paused publisher finds its number taken; what it wrote is nowhere."""
    older, newer = sink.open(SLOT), sink.open(SLOT)
    newer.publish([batch(1)], marker(0))
    with pytest.raises(FencedError, match="slot 1 of sink 'out' was published by another publisher"):
        older.publish([batch(2)], marker(0))
    assert seen(sink) == [1]
    assert last(sink) == marker(0)


def test_a_repeated_put_counts_once(sink: ParquetSink) -> None:
    """I5: a response that was lost: the same records under the same number are the same file."""
    first, again = sink.open(SLOT), sink.open(SLOT)
    first.publish([batch(1)], marker(0))
    again.publish([batch(1)], marker(0))
    assert seen(sink) == [1]


@pytest.mark.parametrize("entry", ["0 uid 1 0.0.m0", "0", "x", "", None])
def test_a_wrong_entry_costs_requests_only(sink: ParquetSink, entry: str | None) -> None:
    """One that is old, damaged or missing: the newest file is found, and the entry is repaired."""
    for number in range(4):
        publish(sink, number, number)
    store = open_store(sink.path)
    right = store.get(entries(store)[-1])
    for key in entries(store):
        store.delete([key]) if entry is None else store.put(key, entry.encode())
    assert last(sink) == marker(3)
    assert store.get(entries(store)[-1]) == right


@pytest.mark.parametrize("moment", ["look", "put"])
def test_paused_publisher_sets_no_marker_back(sink: ParquetSink, stores: list[CountingStore], moment: str) -> None:
    """It stands still before its entry of a checkpoint without records while another publishes many more of them."""
    publish(sink, 0, 0)
    paused = sink.open(SLOT)
    publisher = sink.open(SLOT)

    def others() -> None:
        for number in range(1, 6):
            publisher.publish([], marker(number))

    if moment == "look":
        others()
    else:
        stores[1].before["put"] = others
    with pytest.raises(FencedError):
        paused.publish([], marker(2))
    assert last(sink) == marker(5)


def test_late_entry_in_a_freed_place_changes_nothing(sink: ParquetSink) -> None:
    """Entries that are not the newest are deleted; what a paused publisher puts in their place does not count."""
    for number in range(4):
        publish(sink, number, number)
    store = open_store(sink.path)
    newest = entries(store)[-1]
    store.put(f"{ENTRIES}{0:012d}", b"0 " + marker(0).to_text().encode(), if_absent=True)
    assert last(sink) == marker(3)
    assert entries(store) == [newest]


@pytest.mark.parametrize("branch", [0, 7])
def test_entry_of_a_file_in_a_freed_place_is_put_again(sink: ParquetSink, branch: int) -> None:
    """Its publisher stood still while others published checkpoints without records, whose entries were deleted."""
    publish(sink, 0, 0)
    paused = sink.open(SLOT)
    for number in (1, 2):
        publish(sink, number)
    assert last(sink) == marker(2)
    paused.publish([batch(4)], marker(4, branch))
    paused.close()
    open_store(sink.path).delete(names(sink))
    assert last(sink) == marker(4, branch)


def test_file_whose_entry_comes_in_a_freed_place(sink: ParquetSink, stores: list[CountingStore]) -> None:
    """It is found by a publisher that then stands still; another one was killed before it put the entry, too."""
    publish(sink, 0, 0)
    first, second = sink.open(SLOT), sink.open(SLOT)
    leave_the_entry_out(stores[-2])
    with pytest.raises(UnavailableError, match="no answer"):
        first.publish([batch(4)], marker(4))

    def others() -> None:
        second.publish([], marker(1))
        second.publish([], marker(2))
        store = open_store(sink.path)
        store.delete(entries(store)[:-1])

    with opened_slowly(others):
        assert last(sink) == marker(4)
    open_store(sink.path).delete(names(sink))
    assert last(sink) == marker(4)


@contextmanager
def opened_slowly(others: Callable[[], None]) -> Iterator[None]:
    """Have others do something before the first put of the next publisher that opens a slot."""
    slow = Counter(sinks=1)

    def opening(path: str, **options: Any) -> CountingStore:
        store = CountingStore(open_store(path, **options))
        if slow.pop("sinks", 0):
            store.before["put"] = others
        return store

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "open_store", opening)
        yield


def test_a_slot_that_others_publish_while_it_is_opened(sink: ParquetSink, stores: list[CountingStore]) -> None:
    """Its publisher finds a file, and another one puts the entry and the next file, whose marker is the newest."""
    publish(sink, 0, 0)
    killed = sink.open(SLOT)
    leave_the_entry_out(stores[-1])
    with pytest.raises(UnavailableError, match="no answer"):
        killed.publish([batch(1)], marker(1))
    with opened_slowly(lambda: publish(sink, 2, 2)):
        paused = sink.open(SLOT)
    assert paused.last_published() == marker(2)
    paused.publish([], marker(3))
    paused.close()
    open_store(sink.path).delete(names(sink))
    assert last(sink) == marker(3)


def test_a_publisher_from_whose_file_others_went_on_is_fenced(sink: ParquetSink, stores: list[CountingStore]) -> None:
    """Its file counts. The entry that it finds is not its own, and must not let it put the next one."""
    publish(sink, 0, 0)
    publisher = sink.open(SLOT)
    slow = stores[-1]
    slow.before["put"] = lambda: slow.before.update(put=lambda: publish(sink, 5, 5))
    assert publisher.publish([batch(4)], marker(4)) == 1
    with pytest.raises(FencedError):
        publisher.publish([], marker(5))
    publisher.close()
    assert (last(sink), seen(sink)) == (marker(5), [0, 4, 5])


def test_an_entry_that_is_replaced_while_it_is_looked_for(sink: ParquetSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its successor counts. Without it, a slot whose files were deleted would be published again."""
    for number in range(3):
        publish(sink, number, number)

    def others() -> None:
        monkeypatch.setattr(parquet, "open_store", open_store)
        publish(sink, 3, 3)
        publish(sink, 4)
        open_store(sink.path).delete(names(sink))

    slow = CountingStore(open_store(sink.path))
    slow.before["get"] = others
    monkeypatch.setattr(parquet, "open_store", lambda *_, **__: slow)
    assert last(sink) == marker(4)
    assert "get" not in slow.before


def entries(store: ObjectStore) -> list[str]:
    return sorted(info.key for info in store.list(ENTRIES))


def test_published_files_may_be_deleted(sink: ParquetSink) -> None:
    """After a compaction by others, or a rule for old objects, nothing is published again, and numbers go on."""
    for number in range(3):
        publish(sink, number, number)
    open_store(sink.path).delete(names(sink))
    assert (last(sink), seen(sink)) == (marker(2), [])
    publish(sink, 3, 3)
    assert (last(sink), names(sink)) == (marker(3), ["out-uid-00001-000000000003.parquet"])


def test_a_publish_ends_with_its_entry(sink: ParquetSink, stores: list[CountingStore]) -> None:
    """Until it is there, the publish is repeated; then the file may be deleted, and nothing is published again."""
    publish(sink, 0, 0)
    publisher = sink.open(SLOT)
    leave_the_entry_out(stores[-1])
    with pytest.raises(UnavailableError, match="no answer"):
        publisher.publish([batch(1)], marker(1))
    publisher.close()
    assert last(sink) == marker(1)
    open_store(sink.path).delete(names(sink))
    assert last(sink) == marker(1)


def leave_the_entry_out(store: CountingStore) -> None:
    """Have the second put of a store fail; the first one is that of a file."""

    def refuse() -> None:
        raise UnavailableError("no answer")

    store.before["put"] = lambda: store.before.update(put=refuse)


def test_output_that_was_given_up_does_not_come_late(sink: ParquetSink) -> None:
    """Its paused publisher finds its number taken, though nothing was published meanwhile."""
    publish(sink, 0, 0)
    paused = sink.open(SLOT)
    publish(sink, 7)
    with pytest.raises(FencedError):
        paused.publish([batch(1)], marker(1))
    paused.close()
    assert (last(sink), seen(sink)) == (marker(7), [0])


def test_late_file_sets_no_marker_back(sink: ParquetSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without records, whose publisher was killed before its entry; another one had published more of them."""
    publish(sink, 0, 0)
    paused = sink.open(SLOT)
    for number in range(1, 6):
        publish(sink, number)
    monkeypatch.setattr(paused, "_keep", lambda published, **_: published)
    paused.publish([], marker(2))
    paused.close()
    assert (last(sink), seen(sink), len(names(sink))) == (marker(5), [0], 2)
    assert last(sink) == marker(5)


@pytest.mark.parametrize("sink", ["disk"], indirect=True)
def test_check_deletes_what_killed_publishers_left(sink: ParquetSink, tmp_path: Path) -> None:
    """Files that were not whole yet would fill the disk, crash by crash; young ones may become whole."""
    sink.check(COLUMNS, [SLOT])
    root = tmp_path / "out folder"
    for folder, old, young in ((root / ".tmp", "0" * 32, "1" * 32), (root / "_dstl" / "probe", "a" * 32, "b" * 32)):
        for name, age_s in ((old, 25 * 3600), (young, 23 * 3600)):
            (folder / name).write_bytes(b"PAR1")
            os.utime(folder / name, (time.time() - age_s,) * 2)
        sink.check(COLUMNS, [SLOT])
        assert [path.name for path in folder.iterdir()] == [young]


def test_a_folder_that_cannot_be_listed_is_refused(sink: ParquetSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a slot lists its entries: the start would wait for its patience, as for a system that is away."""

    def refuse(*_: str) -> None:
        raise UnavailableError("access denied")

    monkeypatch.setattr(type(open_store(sink.path)), "list", refuse)
    with pytest.raises(UnavailableError, match="access denied"):
        sink.check(COLUMNS, [SLOT])


@pytest.mark.parametrize("sink", ["disk"], indirect=True)
@pytest.mark.parametrize("linked", ["_dstl", "_dstl/probe", ".tmp"])
def test_check_follows_no_link(sink: ParquetSink, tmp_path: Path, linked: str) -> None:
    """Who may write to the folder cannot have the sink write or delete elsewhere."""
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "out folder" / linked
    for folder in (elsewhere / ".tmp", elsewhere / "probe", link.parent):
        folder.mkdir(parents=True, exist_ok=True)
    files = [
        elsewhere / "0123456789abcdef0123456789abcdef",
        elsewhere / ".tmp" / ("0" * 32),
        elsewhere / "probe" / ("a" * 32),
    ]
    for file in files:
        file.write_bytes(b"of another program")
        os.utime(file, (0, 0))
    link.symlink_to(elsewhere)
    with pytest.raises(UnavailableError, match="a link, which is not followed"):
        sink.check(COLUMNS, [SLOT])
    assert sorted(path for path in elsewhere.rglob("*") if path.is_file()) == sorted(files)


def test_the_check_is_not_seen(sink: ParquetSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the store writes only where readers do not look."""
    kind, found = type(open_store(sink.path)), list[tuple[str, list[str]]]()
    get = kind.get

    def looked(store: ObjectStore, key: str) -> bytes:
        found.append((key, names(sink)))
        return get(store, key)

    monkeypatch.setattr(kind, "get", looked)
    sink.check(COLUMNS, [SLOT])
    assert found
    assert all(key.startswith("_dstl/probe/") for key, _ in found)
    assert [of_reader for _, of_reader in found] == [[]] * len(found)
    assert names(sink) == []


def test_a_publish_costs_few_requests(sink: ParquetSink, stores: list[CountingStore]) -> None:
    """No listing of files, and no growing number, however many files there are."""
    for number in range(5):
        publish(sink, number, number)
    assert stores[0].calls == {"list": 2, "head": 1, "put": 2}
    opened = {"list": 1, "get": 1, "head": 1, "delete": 1}
    assert stores[-1].calls == {**opened, "put": 2}
    publish(sink, 5)
    assert stores[-1].calls == {**opened, "put": 1}


def test_entries_are_few(sink: ParquetSink, stores: list[CountingStore]) -> None:
    """A publisher that stays open deletes old ones, sixteen with a request."""
    publisher = sink.open(SLOT)
    for number in range(40):
        publisher.publish([batch(number)], marker(number))
    assert stores[0].calls["delete"] == 2
    assert len(entries(open_store(sink.path))) == 40 - 32


def test_entries_are_deleted_once(sink: ParquetSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket with versions keeps a marker of each deletion, also of what is gone."""
    kind, deleted = type(open_store(sink.path)), Counter[str]()
    delete = kind.delete

    def noted(store: ObjectStore, keys: Iterable[str]) -> None:
        deleted.update(keys := list(keys))
        delete(store, keys)

    monkeypatch.setattr(kind, "delete", noted)
    for number in range(20):
        publish(sink, number, number)
    publisher = sink.open(SLOT)
    for number in range(20, 40):
        publisher.publish([batch(number)], marker(number))
    publisher.close()
    assert {*deleted.values()} == {1}
    assert len(deleted) + len(entries(open_store(sink.path))) == 40


def test_entries_that_cannot_be_deleted_are_told(
    sink: ParquetSink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A right to delete that is taken away stops no publish, but the folder would grow without a word."""
    kind = type(open_store(sink.path))
    with monkeypatch.context() as changes:

        def refused(store: ObjectStore, keys: Iterable[str]) -> None:
            raise UnavailableError(f"cannot delete {next(iter(keys))}: access denied")

        changes.setattr(kind, "delete", refused)
        publisher = sink.open(SLOT)
        for number in range(40):
            publisher.publish([batch(number)], marker(number))
        publisher.close()
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert f"16 old entries {ENTRIES}* in {open_store(sink.path).url} are not deleted" in caplog.text
        assert "access denied" in caplog.text
        publish(sink, 40, 40)
        assert [record.getMessage()[:15] for record in caplog.records[1:]] == ["39 old entries "]
    caplog.clear()
    publish(sink, 41, 41)
    assert (caplog.records, seen(sink)) == ([], [*range(42)])
    assert len(entries(open_store(sink.path))) == 2


def test_an_empty_publish_is_fenced(sink: ParquetSink) -> None:
    """It has no file whose number could be taken."""
    publish(sink, 0, 1)
    older = sink.open(SLOT)
    publish(sink, 1, 2)
    with pytest.raises(FencedError, match="was published by another publisher"):
        older.publish([], marker(1))
    older.close()
    assert last(sink) == marker(1)


def test_memory_does_not_grow_with_the_records(sink: ParquetSink) -> None:
    """One row group is held, and few of them are made."""
    text = [f"{number:0512d}" for number in range(2048)]
    batches = (pa.record_batch({"k": text, "v": [at] * 2048}, schema=COLUMNS) for at in range(300))
    before = pa.total_allocated_bytes()
    most = 0

    def watched() -> Iterator[pa.RecordBatch]:
        nonlocal most
        for item in batches:
            yield item
            most = max(most, pa.total_allocated_bytes() - before)

    publisher = sink.open(SLOT)
    assert publisher.publish(watched(), marker(0)) == 300 * 2048
    publisher.close()
    assert most < 200 << 20, "of 300 MiB"
    file = pq.ParquetFile(io.BytesIO(open_store(sink.path).get(names(sink)[0])))
    assert (file.num_row_groups, file.metadata.num_rows) == (5, 300 * 2048)
    assert file.read(columns=["v"])["v"].to_pylist()[::2048] == list(range(300))


def test_records_of_a_changed_query_are_one_file(sink: ParquetSink) -> None:
    """Output from before the change lies in the log with its own columns; what cannot be joined is told."""
    new = pa.record_batch({"v": pa.array([2], pa.int64()), "w": ["x"]})
    publisher = sink.open(SLOT)
    assert publisher.publish([batch(1), new, batch(3)], marker(0)) == 3
    table = pq.read_table(io.BytesIO(open_store(sink.path).get(names(sink)[0])))
    assert table.to_pydict() == {"k": ["1", None, "3"], "v": [1, 2, 3], "w": [None, "x", None]}
    for before, after in ((batch(1), ["text"]), (batch(2**53 + 1), [0.5])):
        with pytest.raises(UnavailableError, match="before and after a change of the query does not fit into one file"):
            publisher.publish([before, pa.record_batch({"v": after})], marker(1))
    with pytest.raises(UnavailableError, match="columns v, V are the same to Spark"):
        publisher.publish([batch(1), pa.record_batch({"V": [2]})], marker(1))
    publisher.close()
    assert (last(sink), seen(sink)) == (marker(0), [1, 2, 3])


@pytest.mark.parametrize("sink", ["disk"], indirect=True)
def test_columns_without_nulls_may_come_and_go(sink: ParquetSink) -> None:
    """A column that Spark declares not null, such as a count, is null in rows from before it came, or after it went."""
    before, after = (pa.schema([pa.field(name, pa.int64(), nullable=False)]) for name in ("v", "w"))
    publisher = sink.open(SLOT)
    assert publisher.publish([pa.record_batch([[1]], before), pa.record_batch([[2]], after)], marker(0)) == 2
    publisher.close()
    table = pq.read_table(io.BytesIO(open_store(sink.path).get(names(sink)[0])))
    assert table.to_pydict() == {"v": [1, None], "w": [None, 2]}


@pytest.mark.parametrize("sink", ["disk"], indirect=True)
def test_values_of_a_changed_query_stay_as_they_are(sink: ParquetSink) -> None:
    """Decimals would be rounded to floats, or have more digits than Spark can read; another time zone is no change."""
    precise = pa.array([Decimal("12345678901234.123456")], pa.decimal128(20, 6))
    large = pa.array([Decimal(10) ** 35], pa.decimal128(38, 2))
    publisher = sink.open(SLOT)
    for before, after in ((precise, pa.array([0.5])), (precise, large), (pa.array(["a"]), pa.array([b"a"]))):
        parts = [pa.record_batch({"v": values}) for values in (before, after)]
        with pytest.raises(UnavailableError, match=r"does not fit into one file: column v is .*; rewind the job"):
            publisher.publish(parts, marker(0))
    times = [pa.array([[1]], pa.list_(pa.timestamp("us", zone))) for zone in ("Asia/Tokyo", "UTC")]
    assert publisher.publish([pa.record_batch({"v": time}) for time in times], marker(0)) == 2
    structs = [pa.array([{"a": 1}]), pa.array([{"a": 1, "b": 2}])]
    assert publisher.publish([pa.record_batch({"v": struct}) for struct in structs], marker(1)) == 2
    publisher.close()
    assert [str(value) for value in seen(sink)] == [
        *["[datetime.datetime(1970, 1, 1, 0, 0, 0, 1, tzinfo=zoneinfo.ZoneInfo(key='UTC'))]"] * 2,
        *("{'a': 1, 'b': None}", "{'a': 1, 'b': 2}"),
    ]


@pytest.mark.parametrize("sink", ["disk"], indirect=True)
def test_floats_have_no_dictionary(sink: ParquetSink, tmp_path: Path) -> None:
    """Spark looks 0 up in it, does not find -0.0, which is equal, and skips its rows. Other columns keep theirs."""
    row = {"k": "a", "x": -0.0, "s": {"y": -0.0, "n": 1}, "l": ["a"], "m": [("a", -0.0)]}
    pairs = pa.map_(pa.string(), pa.float64())
    inner = pa.struct({"y": pa.float32(), "n": pa.int64()})
    columns = pa.schema({"k": pa.string(), "x": pa.float64(), "s": inner, "l": pa.list_(pa.string()), "m": pairs})
    publisher = sink.open(SLOT)
    publisher.publish([pa.RecordBatch.from_pylist([row], schema=columns)], marker(0))
    publisher.close()
    (file,) = (tmp_path / "out folder").glob("*.parquet")
    group = pq.read_metadata(file).row_group(0)
    found = [group.column(n) for n in range(group.num_columns)]
    without = {column.path_in_schema for column in found if not column.has_dictionary_page}
    assert without == {"x", "s.y", "m.key_value.value"}


@pytest.mark.parametrize("sink", ["disk"], indirect=True)
def test_floats_have_no_statistics(sink: ParquetSink, tmp_path: Path) -> None:
    """The library leaves NaN out of them, and Spark, to which it is the greatest number, would skip it by a filter."""
    rows = pa.record_batch({"k": ["a", "b"], "x": [1.0, math.nan], "s": [{"y": 1.0, "n": 1}, {"y": math.nan, "n": 2}]})
    publisher = sink.open(SLOT)
    publisher.publish([rows], marker(0))
    publisher.close()
    (file,) = (tmp_path / "out folder").glob("*.parquet")
    group = pq.read_metadata(file).row_group(0)
    has = {group.column(n).path_in_schema: group.column(n).is_stats_set for n in range(group.num_columns)}
    assert has == {"k": True, "x": False, "s.y": False, "s.n": True}


@pytest.mark.parametrize("sink", ["disk"], indirect=True)
def test_floats_beside_a_column_with_their_path(sink: ParquetSink, tmp_path: Path) -> None:
    """A name with dots is that of a field to the library, which would give statistics and dictionary to both."""
    columns = pa.schema({"a.b": pa.string(), "a": pa.struct({"b": pa.float64()})})
    publisher = sink.open(SLOT)
    publisher.publish([pa.RecordBatch.from_pylist([{"a.b": "x", "a": {"b": math.nan}}], schema=columns)], marker(0))
    publisher.close()
    (file,) = (tmp_path / "out folder").glob("*.parquet")
    group = pq.read_metadata(file).row_group(0)
    found = [group.column(number) for number in range(2)]
    assert not any(column.is_stats_set or column.has_dictionary_page for column in found)


def test_errors_of_records_are_not_those_of_the_disk(sink: ParquetSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the temporary file refuses is told as a lack of room; nothing is published."""

    def broken() -> Iterator[pa.RecordBatch]:
        yield batch(1)
        raise OSError(errno.EIO, "the log cannot be read")

    publisher = sink.open(SLOT)
    with pytest.raises(OSError, match="the log cannot be read"):
        publisher.publish(broken(), marker(0))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(UnavailableError, match=r"No space left on device; make room .*TMPDIR"):
        publisher.publish([batch(1)], marker(0))
    publisher.close()
    assert (last(sink), names(sink)) == (None, [])


def _publish_and_stop(sink: ParquetSink, step: str, how: signal.Signals) -> None:
    """Publish in this process; send it a signal at a step."""

    def at(reached: str) -> None:
        if reached == step:
            os.kill(os.getpid(), how)

    def stopping(path: str, **options: Any) -> ObjectStore:
        store = open_store(path, **options)
        put = store.put

        def put_and_stop(key: str, data: ObjectData, *, if_absent: bool = False) -> None:
            at("before the entry" if key.startswith(ENTRIES) else "before the file")
            put(key, data, if_absent=if_absent)

        store.put = put_and_stop  # type: ignore[method-assign]
        return store

    def records() -> Iterator[pa.RecordBatch]:
        yield batch(7)
        at("among the records")

    parquet.open_store = stopping  # type: ignore[attr-defined, assignment]
    sink.open(SLOT).publish(records(), marker(7))


STEPS = ("among the records", "before the file", "before the entry")


@contextmanager
def stopped(sink: ParquetSink, step: str, how: signal.Signals) -> Iterator[SpawnProcess]:
    """A publisher in a process of its own, which has got a signal at a step."""
    process = SPAWN.Process(target=_publish_and_stop, args=(sink, step, how))
    process.start()
    try:
        if how == signal.SIGKILL:
            process.join(60)
        else:
            stat = Path(f"/proc/{process.pid}/stat")
            wait_until(lambda: stat.read_text(encoding="ascii").rpartition(")")[2].split()[0] == "T")
        yield process
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("sink", ["disk"], indirect=True)
@pytest.mark.parametrize("step", STEPS)
def test_killed_publishers_leave_all_or_nothing(sink: ParquetSink, step: str) -> None:
    """The next one sees by the marker which; what was begun is seen by nobody."""
    publish(sink, 0, 1)
    with stopped(sink, step, signal.SIGKILL) as process:
        assert process.exitcode == -signal.SIGKILL
    is_published = step == "before the entry"
    assert (last(sink), seen(sink)) == ((marker(7), [1, 7]) if is_published else (marker(0), [1]))
    publish(sink, 8, 8)
    assert seen(sink) == ([1, 7, 8] if is_published else [1, 8])


@pytest.mark.parametrize("sink", ["s3"], indirect=True)
@pytest.mark.parametrize("step", STEPS)
def test_suspended_publishers_change_nothing_later(sink: ParquetSink, step: str) -> None:
    """They are overtaken while they sleep; awake, they add no record, and the marker stays the newest."""
    publish(sink, 0, 1)
    with stopped(sink, step, signal.SIGSTOP) as process:
        found = last(sink)
        publish(sink, 8, 8)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGCONT)
        process.join(60)
        assert process.exitcode == (1 if found == marker(0) else 0)
    assert (last(sink), seen(sink)) == (marker(8), [1, 8] if found == marker(0) else [1, 7, 8])


def test_wide_files(sink: ParquetSink) -> None:
    """The marker is found in a footer of any length."""
    wide = pa.schema({f"column {number} {'x' * 100}": pa.int64() for number in range(2000)})
    publisher = sink.open(SLOT)
    publisher.publish([pa.RecordBatch.from_pylist([{wide.names[0]: 1}], schema=wide)], marker(0))
    publisher.close()
    assert last(sink) == marker(0)


def test_footer_of_any_length_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write to the folder puts a file that seems to consist of one: it would fill the memory."""
    path = tmp_path / "out-uid-00001-000000000000.parquet"
    with path.open("wb") as file:
        file.seek(300 << 20)
        file.write(((257 << 20).to_bytes(4, "little")) + b"PAR1")
    read = list[int]()
    get_range = LocalStore.get_range
    monkeypatch.setattr(LocalStore, "get_range", lambda *call: (read.append(call[3]), get_range(*call))[1])
    with pytest.raises(CorruptDataError, match="is not a Parquet file"):
        ParquetSink(tmp_path.as_uri()).open(SLOT)
    assert sum(read) < 1 << 20


@pytest.mark.parametrize(
    "data", [b"something else", b"", b"PAR1", b"\xff\xff\xff\xffPAR1", b"x" * 100 + b"\x10\0\0\0PAR1"]
)
def test_foreign_files_are_errors(sink: ParquetSink, data: bytes) -> None:
    """A file that the sink did not write is never taken for its own."""
    open_store(sink.path).put("out-uid-00001-000000000000.parquet", data)
    with pytest.raises(CorruptDataError, match=r"is not a Parquet file|has no marker"):
        sink.open(SLOT)


def test_columns_are_checked(sink: ParquetSink) -> None:
    """Types that Parquet cannot store are found at the start."""
    with pytest.raises(InvalidInputError, match="cannot be stored as Parquet"):
        sink.check(pa.schema({"d": pa.month_day_nano_interval()}), [SLOT])
    with pytest.raises(InvalidInputError, match="columns v, V are the same to Spark, which ignores case"):
        sink.check(pa.schema({"v": pa.int64(), "V": pa.int64()}), [SLOT])
    nested = pa.list_(pa.struct({"a": pa.int64(), "A": pa.int64()}))
    with pytest.raises(InvalidInputError, match=r"columns v\.item\.a, v\.item\.A are the same to Spark"):
        sink.check(pa.schema({"v": nested}), [SLOT])


def test_files_that_readers_leave_out_are_refused(sink: ParquetSink) -> None:
    """Files begin with the sink's name, and those that begin with an underscore are hidden."""
    with pytest.raises(InvalidInputError, match=r"sink '_out' cannot have Parquet files: readers leave out files"):
        sink.check(COLUMNS, [replace(SLOT, sink="_out")])


def test_a_later_job_of_the_name_begins_anew(sink: ParquetSink) -> None:
    """Files of a deleted job say nothing of what its successor has published."""
    publish(sink, 7, 1)
    publisher = sink.open(Slot("job", "other", "out", 1, COLUMNS))
    assert publisher.last_published() is None
    publisher.close()


def test_entries_that_change_all_the_time_count_as_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for none, a slot whose files were deleted would be published again."""
    sink = ParquetSink(tmp_path.as_uri())
    publish(sink, 0, 1)
    open_store(sink.path).delete(names(sink))

    class Changing(CountingStore):
        def get(self, key: str) -> bytes:
            raise NotFoundError(f"there is no object {key}")

    monkeypatch.setattr(parquet, "open_store", lambda path, **_: Changing(open_store(path)))
    with pytest.raises(UnavailableError, match="change too fast to be read: other publishers run"):
        sink.open(SLOT)
