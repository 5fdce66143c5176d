"""Publishing to tables of Delta Lake: what readers see, what others may do to the table, on a disk and on S3."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import socket
import traceback
from ast import literal_eval
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from deltalake.exceptions import DeltaError

from backend_client.sinks.delta import DeltaSink
from backend_client.sinks.delta import sink as delta_sink
from backend_client.sinks.protocol import Marker, Slot
from dstl_service.wire import BRANCH_GENERATIONS, CheckpointRef
from storage.errors import CorruptDataError, FencedError, InvalidInputError, UnavailableError
from tools.servers.s3_server import S3Server

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

COLUMNS = pa.schema({"k": pa.string(), "v": pa.int64()})
SLOT = Slot("job", "uid", "out", 1, COLUMNS)
UID = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        server.create_bucket("bucket")
        yield server


@pytest.fixture(params=["disk", "s3"])
def sink(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeltaSink:
    """A sink with an empty table."""
    if request.param == "disk":
        made = DeltaSink((tmp_path / "out folder, 100%").as_uri())
    else:
        for name, value in request.getfixturevalue("s3").env().items():
            monkeypatch.setenv(name, value)
        made = DeltaSink(f"s3://bucket/{tmp_path.name}/out")
    made.check(COLUMNS, [SLOT])
    return made


on_disk = pytest.mark.parametrize("sink", ["disk"], indirect=True)


def marker(checkpoint_id: int, branch: int = 0, slot: int = 1) -> Marker:
    return Marker("uid", slot, CheckpointRef(checkpoint_id, branch * BRANCH_GENERATIONS, UID))


def batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"k": [str(value) for value in values], "v": list(values)}, schema=COLUMNS)


def publish(sink: DeltaSink, checkpoint_id: int, *values: int, branch: int = 0) -> None:
    publisher = sink.open(SLOT)
    publisher.publish([batch(*values)] if values else [], marker(checkpoint_id, branch))
    publisher.close()


def last(sink: DeltaSink) -> Marker | None:
    publisher = sink.open(SLOT)
    try:
        return publisher.last_published()
    finally:
        publisher.close()


def seen(sink: DeltaSink) -> list[int]:
    return sorted(sink.table().to_pyarrow_table()["v"].to_pylist())


def log(sink: DeltaSink) -> Path:
    return Path(sink.location) / "_delta_log"


def test_records_and_marker_are_one_commit(sink: DeltaSink) -> None:
    """Any reader of the format sees the rows; the table's history names the checkpoint."""
    version = sink.table().version()
    publish(sink, 0, 1, 2)
    publish(sink, 1)
    assert last(sink) == marker(1), "without records, too"
    publish(sink, 2, 3)
    assert (last(sink), seen(sink)) == (marker(2), [1, 2, 3])
    table = sink.table()
    assert (table.version(), table.transaction_version("dstl/out/uid/1")) == (version + 3, 2)
    assert table.history(1)[0]["dstl"] == f"sink out, slot 1: 2.0.{UID}"
    files = [unquote(path) for path in table.file_uris()] if sink.is_local else []
    assert [value for path in files for value in pq.read_table(path)["v"].to_pylist()] == [3, 1, 2][: 3 * len(files)]


def test_markers_of_any_length(sink: DeltaSink) -> None:
    """All branches of a long marker come back, and shorter markers after it, too."""
    for length in range(1, 10):
        short = Marker("uid", 1, CheckpointRef(7, 0, "u" * length))
        long = Marker(
            "uid", 1, CheckpointRef(10**18 - 1, 10**18 - 1, "u" * 64), tuple((n, 10**17 + n) for n in range(20))
        )
        for one in (long, short):
            publisher = sink.open(SLOT)
            publisher.publish([batch(1)], one)
            publisher.close()
            assert last(sink) == one


def test_an_older_publisher_is_fenced_by_the_log(sink: DeltaSink) -> None:
    """Delta refuses its commit, because a later version has a transaction of the slot; commits of others do no harm."""
    older = sink.open(SLOT)
    other = sink.open(Slot("job", "uid", "out", 0, COLUMNS))
    publish(sink, 0, 1)
    write_deltalake(sink.table(), pa.table({"k": ["x"], "v": [9]}), mode="append")
    other.publish([batch(5)], marker(0, slot=0))
    with pytest.raises(FencedError, match="was published by another publisher"):
        older.publish([batch(1)], marker(0))
    assert (last(sink), seen(sink)) == (marker(0), [1, 5, 9])


def test_an_empty_publish_is_fenced(sink: DeltaSink) -> None:
    """A marker alone is a commit, too."""
    publish(sink, 0, 1)
    older = sink.open(SLOT)
    publish(sink, 1, 2)
    with pytest.raises(FencedError, match="was published by another publisher"):
        older.publish([], marker(1))
    assert last(sink) == marker(1)


def test_the_library_itself_refuses_a_second_transaction(sink: DeltaSink) -> None:
    """Fencing relies on this: two commits on one version, both with a transaction of one name."""
    from deltalake import CommitProperties, Transaction

    properties = CommitProperties(app_transactions=[Transaction("name", 1)], max_commit_retries=100)
    first, second = sink.table(), sink.table()
    rows = pa.table({"k": ["x"], "v": [1]})
    write_deltalake(first, rows, mode="append", commit_properties=properties)
    with pytest.raises(DeltaError, match="Concurrent transaction"):
        write_deltalake(second, rows, mode="append", commit_properties=properties)
    assert seen(sink) == [1]


@on_disk
def test_the_marker_outlives_the_log(sink: DeltaSink) -> None:
    """Checkpoints of the table's log have it; commits older than that may be deleted."""
    publish(sink, 0, 1)
    publish(sink, 1, 2)
    table = sink.table()
    table.alter.set_table_properties({"delta.logRetentionDuration": "interval 0 days"})
    for number in range(5):
        write_deltalake(table, pa.table({"k": ["x"], "v": [number + 10]}), mode="append")
    table.create_checkpoint()
    table.cleanup_metadata()
    assert [path.name for path in sorted(log(sink).glob("*.json"))] == [f"{table.version():020d}.json"]
    assert (last(sink), seen(sink)) == (marker(1), [1, 2, *range(10, 15)])
    for checkpoint_id in range(2, 15):
        publish(sink, checkpoint_id, checkpoint_id + 13)
    assert len([*log(sink).glob("*.checkpoint.parquet")]) >= 1, "the log has checkpoints of its own"
    assert (last(sink), seen(sink)) == (marker(14), [1, 2, *range(10, 28)])


@pytest.mark.parametrize("change", ["compact", "vacuum", "overwrite", "delete", "restore"])
def test_others_change_the_table(sink: DeltaSink, change: str) -> None:
    """Nothing is published again, and publishing goes on; a publisher that was open meanwhile, too."""
    publish(sink, 0, 1)
    publish(sink, 1, 2)
    table, opened = sink.table(), sink.open(SLOT)
    left = [1, 2]
    if change == "compact":
        assert table.optimize.compact()["numFilesRemoved"] == 2
    elif change == "vacuum":
        table.optimize.compact()
        removed = table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
        assert len(removed) == 2
    elif change == "overwrite":
        write_deltalake(table, pa.table({"k": ["x"], "v": [9]}), mode="overwrite")
        left = [9]
    elif change == "delete":
        table.delete()
        left = []
    else:
        table.restore(table.version() - 1)
        left = [1]
    assert (last(sink), seen(sink)) == (marker(1), left)
    try:
        opened.publish([batch(3)], marker(2))
    except UnavailableError:
        publish(sink, 2, 3)  # what it read was deleted
    assert (last(sink), seen(sink)) == (marker(2), sorted([*left, 3]))


def test_a_table_that_forgets_transactions_is_refused(sink: DeltaSink) -> None:
    """At the start, and when the property is set later."""
    publish(sink, 0, 1)
    sink.table().alter.set_table_properties({"delta.setTransactionRetentionDuration": "interval 1 days"})
    for use in (lambda: sink.check(COLUMNS, [SLOT]), lambda: sink.open(SLOT)):
        with pytest.raises(UnavailableError, match="it forgets what was published to it: unset this property"):
            use()


@on_disk
def test_a_late_commit_behind_a_cleaned_log_is_no_success(sink: DeltaSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A process stands still between choosing a number and putting the commit, until the log is cleaned.

    The number is then free again, and nobody looks for it: records would be lost if that counted as published.
    """
    publish(sink, 0, 1)
    older, chosen = sink.open(SLOT), sink.table().version() + 1
    for _ in range(3):
        write_deltalake(sink.table(), pa.table({"k": ["x"], "v": [9]}), mode="append")
    table = sink.table()
    table.create_checkpoint()
    kept = {path: path.read_bytes() for path in log(sink).iterdir()}
    # The log as the older publisher saw it when it chose the number: without what came after.
    for path in kept:
        name = path.name.split(".")[0]
        if name == "_last_checkpoint" or int(name) >= chosen:
            path.unlink()
    load = DeltaSink.table

    def cleaned_meanwhile(self: DeltaSink) -> DeltaTable:
        """What the publisher looks at after its commit."""
        for path, data in kept.items():
            name = path.name.split(".")[0]
            if name == "_last_checkpoint" or int(name) > chosen:
                path.write_bytes(data)
        for path in log(sink).glob("*.json"):
            if int(path.name.split(".")[0]) < chosen:
                path.unlink()
        return load(self)

    monkeypatch.setattr(DeltaSink, "table", cleaned_meanwhile)
    with pytest.raises(FencedError):
        older.publish([batch(2)], marker(1))
    monkeypatch.undo()
    assert (last(sink), seen(sink)) == (marker(0), [1, 9, 9, 9])
    publish(sink, 1, 2)
    assert (last(sink), seen(sink)) == (marker(1), [1, 2, 9, 9, 9])


def test_partitions(tmp_path: Path) -> None:
    """Files of several partitions are one commit."""
    columns = pa.schema({"day": pa.date32(), "v": pa.int64()})
    sink = DeltaSink((tmp_path / "out").as_uri(), partition_by=("day",))
    sink.check(columns, [SLOT])
    sink.check(columns, [SLOT])
    publisher = sink.open(SLOT)
    days = [date(2026, 1, 1), date(2026, 1, 2), None]
    assert publisher.publish([pa.record_batch({"day": days, "v": [1, 2, 3]}, schema=columns)], marker(0)) == 3
    table = sink.table()
    assert len(table.file_uris()) == 3
    assert table.to_pyarrow_table(filters=[("day", "=", date(2026, 1, 2))])["v"].to_pylist() == [2]
    with pytest.raises(InvalidInputError, match="is partitioned by day, not by v"):
        DeltaSink(sink.path, partition_by=("v",)).check(columns, [SLOT])


@on_disk
@pytest.mark.parametrize("given", [pa.decimal128(10, 2), pa.binary(), pa.timestamp("us", "UTC")], ids=str)
def test_partitions_that_readers_could_not_read_are_refused(
    sink: DeltaSink, tmp_path: Path, given: pa.DataType
) -> None:
    """
    One negative number with a fraction would make a table unreadable for good, also one that others made.

    The library writes moments in UTC without saying so, and Spark takes them for those of its session's zone.
    """
    columns = pa.schema({"p": given, "v": pa.int64()})
    with pytest.raises(InvalidInputError, match=r"column p is .*: partition by another column, or cast it"):
        DeltaSink((tmp_path / "new").as_uri(), partition_by=("p",)).check(columns, [SLOT])
    assert not DeltaTable.is_deltatable(str(tmp_path / "new"))
    DeltaTable.create(tmp_path / "old", columns, partition_by=["p"])
    with pytest.raises(InvalidInputError, match=r"column p is .*: partition by another column, or cast it"):
        DeltaSink((tmp_path / "old").as_uri()).check(columns, [SLOT])
    DeltaSink((tmp_path / "whole").as_uri(), partition_by=("p",)).check(
        pa.schema({"p": pa.decimal128(10), "v": pa.int64()}), [SLOT]
    )
    DeltaSink((tmp_path / "local").as_uri(), partition_by=("p",)).check(
        pa.schema({"p": pa.timestamp("us"), "v": pa.int64()}), [SLOT]
    )


@on_disk
def test_readers_miss_no_decimal_by_statistics(sink: DeltaSink, tmp_path: Path) -> None:
    """The library's statistics of decimals are floats: a filter would skip the file with exactly this number."""
    value = Decimal("-99999999999999.99")
    columns = pa.schema({"k": pa.string(), "n": pa.decimal128(16, 2), "s": pa.struct({"n": pa.decimal128(38, 18)})})
    made = DeltaSink((tmp_path / "new").as_uri())
    made.check(columns, [SLOT])
    made.check(columns, [SLOT])
    rows = pa.RecordBatch.from_pylist([{"k": "a", "n": value, "s": {"n": value}}], schema=columns)
    made.open(SLOT).publish([rows], marker(0))
    found = made.table().to_pyarrow_dataset()
    assert found.filter(ds.field("n") == pa.scalar(value, pa.decimal128(16, 2))).count_rows() == 1
    assert found.filter(ds.field("k") == "b").count_rows() == 0
    DeltaTable.create(tmp_path / "old", columns)
    others = DeltaSink((tmp_path / "old").as_uri())
    with pytest.raises(
        InvalidInputError, match=r"column n, s .* more than 15 digits: .* readers .* would miss rows"
    ) as told:
        others.check(columns, [SLOT])
    others.table().alter.set_table_properties(literal_eval(str(told.value).partition("set_table_properties(")[2][:-1]))
    others.check(columns, [SLOT])
    sink.check(COLUMNS, [SLOT])
    with pytest.raises(InvalidInputError, match=r"column n of table .* more than 15 digits"):
        DeltaSink(sink.path, merge_schema=True).check(pa.schema([*COLUMNS, columns.field("n")]), [SLOT])
    assert sink.table().schema().to_arrow().names == ["k", "v"]


@on_disk
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "nested"])
def test_readers_miss_no_float_by_statistics(tmp_path: Path, sink: DeltaSink, value: float, is_nested: bool) -> None:
    """The library writes infinities as null and leaves NaN out: filters would skip them, and the rows beside."""
    plain = pa.schema({"k": pa.string(), "x": pa.float64()})
    nested = {"x": pa.float64(), "n": pa.int64()}
    columns = (
        pa.schema({"k": pa.string(), "s": pa.struct(nested), "t": pa.struct({"n": pa.int64()})}) if is_nested else plain
    )
    rows = pa.RecordBatch.from_pylist(
        [{"k": "a", "x": number, "s": {"x": number, "n": 1}, "t": {"n": 2}} for number in (1.0, value)], schema=columns
    )
    DeltaTable.create(tmp_path / "others", columns)
    for made in (DeltaSink((tmp_path / "new").as_uri()), DeltaSink((tmp_path / "others").as_uri())):
        made.check(columns, [SLOT])
        try:
            made.open(SLOT).publish([rows], marker(0))
        except UnavailableError as error:
            text = str(error)
            assert made.path.endswith("others")
            assert "NaN or an infinity: readers that filter by it would miss rows" in text
            made.table().alter.set_table_properties(literal_eval(text.partition("set_table_properties(")[2][:-1]))
            made.open(SLOT).publish([rows], marker(0))
        found, column = made.table().to_pyarrow_dataset(), ds.field("s", "x") if is_nested else ds.field("x")
        assert found.filter(column == 1.0).count_rows() == 1
        assert found.filter(ds.field("k") == "b").count_rows() == 0
        if is_nested:
            assert found.filter((ds.field("s", "n") == 1) & (ds.field("t", "n") == 2)).count_rows() == 2
        name = "s['x']" if is_nested else "x"
        where = f"{name} = double '{str(value).replace('inf', 'Infinity')}'"
        seen = QueryBuilder().register("t", made.table()).execute(f"select k from t where {where}")
        assert sum(batch.num_rows for batch in seen) == 1


@on_disk
@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("has_statistics", [False, True])
def test_floats_have_no_dictionary(tmp_path: Path, sink: DeltaSink, is_nested: bool, has_statistics: bool) -> None:
    """Spark looks 0 up in it, does not find -0.0, which is equal, and skips its rows; other plain columns have one."""
    columns = pa.schema({"k": pa.string(), "x": pa.float64()})
    if is_nested:
        columns = columns.append(pa.field("s", pa.struct({"y": pa.float32()})))
    rows = pa.RecordBatch.from_pylist([{"k": "a", "x": -0.0, "s": {"y": -0.0}}] * 3, schema=columns)
    made = DeltaSink((tmp_path / "floats").as_uri())
    if has_statistics:
        DeltaTable.create(tmp_path / "floats", columns)
    made.check(columns, [SLOT])
    made.open(SLOT).publish([rows], marker(0))
    (file,) = (tmp_path / "floats").glob("*.parquet")
    group = pq.read_metadata(file).row_group(0)
    found = [group.column(n) for n in range(group.num_columns)]
    assert {column.path_in_schema for column in found if column.has_dictionary_page} == {"k"}
    assert {column.path_in_schema for column in found if column.is_stats_set} == (
        {column.path_in_schema for column in found} if has_statistics else {"k"}
    )


def test_columns_are_added_if_wanted(sink: DeltaSink) -> None:
    """Only with `merge_schema`, at the start; older rows have null there, and unpublished output of before fits."""
    publish(sink, 0, 1)
    wider = pa.schema([*COLUMNS, pa.field("w", pa.list_(pa.float64()))])
    with pytest.raises(InvalidInputError, match="has no column w; it has k, v: add it, or set merge_schema"):
        sink.check(wider, [SLOT])
    merging = DeltaSink(sink.path, merge_schema=True)
    merging.check(wider, [SLOT])
    publisher = merging.open(SLOT)
    new = pa.record_batch({"v": [3], "w": [[0.5]]}, schema=pa.schema([wider.field("v"), wider.field("w")]))
    assert publisher.publish([batch(2), new], marker(1)) == 2
    found = sorted(sink.table().to_pyarrow_table().to_pylist(), key=lambda row: row["v"])
    assert found == [{"k": "1", "v": 1, "w": None}, {"k": "2", "v": 2, "w": None}, {"k": None, "v": 3, "w": [0.5]}]


@on_disk
def test_files_of_partitions_are_flushed(tmp_path: Path, sink: DeltaSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk, files and commit are on it before the log may give the records up; also where a value is escaped."""
    flushed = list[str]()
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    made = DeltaSink((tmp_path / "escaped").as_uri(), partition_by=("k",))
    made.check(COLUMNS, [SLOT])
    publisher = made.open(SLOT)
    publisher.publish([pa.record_batch({"k": ["a b/c%", None], "v": [1, 2]}, schema=COLUMNS)], marker(0))
    there = {str(path) for path in (tmp_path / "escaped").rglob("*.parquet")}
    newest = str(max((tmp_path / "escaped" / "_delta_log").glob("*.json")))
    assert len(there) == 2
    assert there < {*flushed}
    assert flushed[-2:] == [newest, os.path.dirname(newest)]
    columns = pa.schema({"a": pa.int64(), "b": pa.int64(), "v": pa.int64()})
    nested = DeltaSink((tmp_path / "nested").as_uri(), partition_by=("a", "b"))
    nested.check(columns, [SLOT])
    nested.open(SLOT).publish([pa.record_batch([[1], [2], [3]], schema=columns)], marker(0))
    assert {str(tmp_path / "nested" / name) for name in ("a=1/b=2", "a=1", ".")} <= {*flushed}


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The files and folders that are flushed in a test."""
    found = set[str]()
    monkeypatch.setattr(os, "fsync", lambda descriptor: found.add(os.readlink(f"/proc/self/fd/{descriptor}")))
    return found


@pytest.mark.parametrize("path", ["a/../out", "link/../out", "link", "out/"])
def test_files_are_flushed_whatever_the_spelling_of_a_path(tmp_path: Path, flushed: set[str], path: str) -> None:
    """Its parts may be `..` and links, which the library follows; the one of a link to a folder is that of its end."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    sink = DeltaSink(f"file://{tmp_path}/{path}", partition_by=("k",))
    sink.check(COLUMNS, [SLOT])
    flushed.clear()
    publish(sink, 0, 1, 2)
    there = {str(file) for file in tmp_path.rglob("*.parquet")}
    assert len(there) == 2
    assert there < flushed
    assert seen(sink) == [1, 2]


@on_disk
def test_marker_without_records_is_flushed(sink: DeltaSink, flushed: set[str]) -> None:
    """The library does not tell the version of such a commit; another writer's may have come after it."""
    publish(sink, 0, 1)
    flushed.clear()
    publish(sink, 1)
    assert str(max(log(sink).glob("*.json"))) in flushed


@on_disk
def test_checkpoint_of_the_log_is_flushed(sink: DeltaSink, flushed: set[str]) -> None:
    """The library makes one with every tenth commit, and no reader opens a table whose newest one is cut off."""
    found, checkpoint_id = set[str](), 0
    while not found:
        flushed.clear()
        publish(sink, checkpoint_id, checkpoint_id)
        found = {str(path) for path in (*log(sink).glob("*.checkpoint*"), *log(sink).glob("_last_checkpoint"))}
        checkpoint_id += 1
    assert len(found) == 2
    assert found < flushed


def test_what_the_check_commits_is_flushed(tmp_path: Path, flushed: set[str]) -> None:
    """The first commits of a table, new columns, and the names of new folders: output is nothing without them."""
    path = tmp_path / "a" / "b" / "out"
    DeltaSink(path.as_uri()).check(COLUMNS, [SLOT])
    made = {str(found) for found in (tmp_path, *tmp_path.rglob("*"))}
    assert made <= flushed
    flushed.clear()
    wide = COLUMNS.append(pa.field("w", pa.int64()))
    DeltaSink(path.as_uri(), merge_schema=True).check(wide, [SLOT])
    added = {str(found) for found in path.rglob("*")} - made
    assert len(added) == 2
    assert added <= flushed


@on_disk
def test_commit_of_a_killed_publisher_is_flushed(sink: DeltaSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one publishes it, and the log gives the records up; also where others have committed since."""

    def be_killed(_: int) -> None:
        raise KeyboardInterrupt

    flushed = list[str]()
    monkeypatch.setattr(os, "fsync", be_killed)
    with pytest.raises(KeyboardInterrupt):
        publish(sink, 0, 1)
    commit = max(log(sink).glob("*.json"))
    other = sink.open(replace(SLOT, number=2))
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    other.publish([batch(2)], marker(0, slot=2))
    (file,) = (json.loads(line)["add"]["path"] for line in commit.read_text().splitlines() if line.startswith('{"add"'))
    unflushed = {str(commit), str(Path(sink.location) / file)}
    assert unflushed.isdisjoint(flushed)
    assert last(sink) == marker(0)
    assert unflushed <= {*flushed}
    flushed.clear()
    os.utime(max(log(sink).glob("*.json")), times=(0, 0))
    assert (last(sink), flushed) == (marker(0), [])


@on_disk
@pytest.mark.timeout(20)
def test_files_outside_the_table_are_not_opened(
    tmp_path: Path, sink: DeltaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may write to the table may write a commit with the sink's marker and paths; to open a pipe never ends."""
    publish(sink, 0, 1)
    (tmp_path / "private").write_bytes(b"1")
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(Path(sink.location) / "pipe")
    commit = max(log(sink).glob("*.json"))
    actions = [json.loads(line) for line in commit.read_text().splitlines()]
    (added,) = (action for action in actions if "add" in action)
    paths = ("pipe", "../pipe", f"{tmp_path}/pipe", "../private", f"{tmp_path}/private", "../%70rivate")
    actions += [{"add": {**added["add"], "path": path, "size": 0}} for path in paths]
    flushed = list[str]()
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    actions = [action for action in actions if action is not added]
    commit.write_text("".join(json.dumps(action) + "\n" for action in actions))
    assert last(sink) == marker(0)
    assert {*flushed} == {str(commit), str(commit.parent), sink.location}


@on_disk
@pytest.mark.parametrize(
    "line",
    [
        pytest.param("", id="empty"),
        '{"add": null, "txn": null}',
        pytest.param(f'{{"commitInfo": {{"a": {"[" * 5000}{"]" * 5000}}}}}', id="deep"),
        pytest.param(f'{{"commitInfo": {{"a": {"9" * 5000}}}}}', id="number"),
        pytest.param(
            '{"txn": {"appId": "dstl/out/uid/1", "version": 0}}\n'
            '{"add": {"path": 5, "partitionValues": {}, "size": "1", "modificationTime": 1, "dataChange": true}}',
            id="types",
        ),
    ],
)
def test_commits_of_others_stop_no_publisher(sink: DeltaSink, line: str) -> None:
    """The library takes what other writers put there, so each publisher that opens the slot may see it."""
    publish(sink, 0, 1)
    commit = log(sink) / f"{sink.table().version() + 1:020d}.json"
    commit.write_text(f'{{"commitInfo": {{"timestamp": 1}}}}\n{line}\n')
    assert last(sink) == marker(0)
    publish(sink, 1, 2)
    assert last(sink) == marker(1)


@on_disk
@pytest.mark.parametrize("path", ["FILE/a", "a%00b", "a" * 300], ids=["within", "nul", "long"])
def test_paths_that_no_file_has_stop_nobody(sink: DeltaSink, path: str) -> None:
    """A commit of another writer names one, with or without the slot's marker; the library takes it."""
    publish(sink, 0, 1)
    commit = max(log(sink).glob("*.json"))
    (added,) = (json.loads(line) for line in commit.read_text().splitlines() if '"add"' in line)
    line = json.dumps({"add": {**added["add"], "path": path.replace("FILE", added["add"]["path"])}})
    other = log(sink) / f"{sink.table().version() + 1:020d}.json"
    other.write_text(f'{{"commitInfo": {{"timestamp": 1}}}}\n{line}\n')
    sink.check(COLUMNS, [SLOT])
    commit.write_text(f"{commit.read_text()}{line}\n")
    assert last(sink) == marker(0)
    publish(sink, 1, 2)
    assert last(sink) == marker(1)


@on_disk
def test_files_of_another_user_stop_no_start(
    sink: DeltaSink, flushed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another writer's newest commits, what may not be opened is not flushed."""
    write_deltalake(sink.location, pa.table({"k": ["a"], "v": [1]}, schema=COLUMNS), mode="append")
    private, really = {str(file) for file in Path(sink.location).glob("*.parquet")}, os.open

    def opened(path: Any, *args: Any, **options: Any) -> int:
        if str(path) in private:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return really(path, *args, **options)

    monkeypatch.setattr(os, "open", opened)
    DeltaSink(sink.path).check(COLUMNS, [SLOT])
    assert {str(commit) for commit in log(sink).glob("*.json")} <= flushed
    assert private
    assert private.isdisjoint(flushed)


@on_disk
def test_commit_that_a_lost_host_cut_off_is_not_published(sink: DeltaSink) -> None:
    """Its file was not on the disk; where others have removed the file from the table, that is no loss."""
    publish(sink, 0, 1)
    publish(sink, 1, 2)
    commit = max(log(sink).glob("*.json"))
    (file,) = (json.loads(line)["add"]["path"] for line in commit.read_text().splitlines() if line.startswith('{"add"'))
    os.truncate(Path(sink.location) / file, 100)
    with pytest.raises(UnavailableError, match=rf"has 100 of \d+ bytes: .* If {commit.name} is the newest commit"):
        sink.open(SLOT)
    commit.rename(commit.with_suffix(".removed"))
    assert (last(sink), seen(sink)) == (marker(0), [1])
    commit.with_suffix(".removed").rename(commit)
    sink.table().delete()
    assert last(sink) == marker(1)


@on_disk
@pytest.mark.parametrize("look_after_s", [-1.0, 10.0])
def test_a_table_that_is_made_anew_is_another_one(
    sink: DeltaSink, monkeypatch: pytest.MonkeyPatch, look_after_s: float
) -> None:
    """A publisher that stood still adds nothing to it; one that comes in the same moment tells that it did."""
    monkeypatch.setattr("backend_client.sinks.delta.sink._LOOKED_AGAIN_AFTER_S", look_after_s)
    publish(sink, 0, 1)
    older = sink.open(SLOT)
    shutil.rmtree(sink.location)
    sink.check(COLUMNS, [SLOT])
    for value in (7, 8, 9):
        write_deltalake(sink.location, pa.table(batch(value)), mode="append")
    with pytest.raises(UnavailableError, match="was deleted and created again"):
        older.publish([batch(2)], marker(1))
    is_late = look_after_s < 0
    assert (last(sink), seen(sink)) == ((None, [7, 8, 9]) if is_late else (marker(1), [2, 7, 8, 9]))


@on_disk
@pytest.mark.parametrize("passed_s", [(-3600.0, 20.0), (20.0, 0.0)])
def test_a_clock_that_is_set_back_hides_no_pause(
    sink: DeltaSink, monkeypatch: pytest.MonkeyPatch, passed_s: tuple[float, float]
) -> None:
    """Nor does one that stands still while its host is suspended: a table that was made anew gets nothing."""
    now_s = [1_000_000.0, 500.0]
    clocks = SimpleNamespace(time=lambda: now_s[0], monotonic=lambda: now_s[1])
    monkeypatch.setattr("backend_client.sinks.delta.sink.time", clocks)
    publish(sink, 0, 1)
    older = sink.open(SLOT)
    shutil.rmtree(sink.location)
    sink.check(COLUMNS, [SLOT])
    for value in (7, 8, 9):
        write_deltalake(sink.location, pa.table(batch(value)), mode="append")
    now_s[:] = (now + passed for now, passed in zip(now_s, passed_s, strict=True))
    with pytest.raises(UnavailableError, match="was deleted and created again"):
        older.publish([batch(2)], marker(1))
    assert (last(sink), seen(sink)) == (None, [7, 8, 9])


def test_a_publisher_publishes_without_records_and_goes_on(sink: DeltaSink) -> None:
    """The library's table does not learn of an empty commit, which then looks like one of another publisher."""
    sink.check(COLUMNS, [SLOT])
    publisher = sink.open(SLOT)
    for number, values in enumerate([[1], [], [], [2]]):
        publisher.publish([batch(*values)] if values else [], marker(number))
    assert (last(sink), seen(sink)) == (marker(3), [1, 2])


@on_disk
@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\r\n"])
def test_text_with_ends_of_lines(sink: DeltaSink, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit has such text as it is, in its statistics; the sink's own look at it takes none for a line's end."""
    flushed = list[str]()
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    for number in (0, 1):
        rows = pa.record_batch({"k": [f"a{end}b"], "v": [number]}, schema=COLUMNS)
        sink.open(SLOT).publish([rows], marker(number))
    assert (last(sink), seen(sink)) == (marker(1), [0, 1])
    assert {str(file) for file in Path(sink.location).glob("*.parquet")} <= {*flushed}


@on_disk
def test_old_commits_are_removed_now_and_then(sink: DeltaSink) -> None:
    """The library lists the whole log to find them: in each publish, that would take longer with every one."""
    sink.table().alter.set_table_properties({"delta.logRetentionDuration": "interval 0 days"})
    first = replace(SLOT, number=0)

    def commits_after(checkpoint_id: int, *slots: Slot) -> int:
        for slot in slots:
            sink.open(slot).publish([batch(checkpoint_id)], marker(checkpoint_id, slot=slot.number))
        return len(list(log(sink).glob("*.json")))

    before = [commits_after(checkpoint_id, first, SLOT) for checkpoint_id in range(995, 1000)]
    assert before == list(range(before[0], before[0] + 10, 2))
    assert commits_after(1000, SLOT) == before[-1] + 1
    assert commits_after(1000, first) < before[-1]
    assert [last.checkpoint.id for slot in (first, SLOT) if (last := sink.open(slot).last_published())] == [1000, 1000]


@on_disk
def test_types_come_back(tmp_path: Path, sink: DeltaSink) -> None:
    """All types of Spark that Delta has, nested ones, and times of any zone."""
    values = {
        "byte": pa.array([1], pa.int8()),
        "decimal": pa.array([None], pa.decimal128(38, 10)),
        "binary": pa.array([b"\0"]),
        "bool": pa.array([True]),
        "day": pa.array([1], pa.date32()),
        "at": pa.array([1], pa.timestamp("us", "Europe/Berlin")),
        "local": pa.array([1], pa.timestamp("us")),
        "map": pa.array([[("a", [1.5])]], pa.map_(pa.string(), pa.list_(pa.float32()))),
        "struct": pa.array([{"x": 1, "at": 0}], pa.struct({"x": pa.int16(), "at": pa.timestamp("us", "Asia/Tokyo")})),
    }
    given = pa.record_batch(values)
    typed = DeltaSink((tmp_path / "types").as_uri())
    typed.check(given.schema, [SLOT])
    typed.check(given.schema, [SLOT])
    publisher = typed.open(SLOT)
    publisher.publish([given], marker(0))
    assert json.dumps(typed.table().to_pyarrow_table().cast(given.schema).to_pylist(), default=str) == json.dumps(
        given.to_pylist(), default=str
    )


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"k": pa.string(), "v": pa.duration("us")}, "column v is duration"),
        ({"k": pa.string(), "v": pa.null()}, "column v is null: something in it has no type"),
        ({"k": pa.string(), "w": pa.list_(pa.null())}, "column w is list.*: something in it has no type"),
        ({"k": pa.string(), "w": pa.struct([("x", pa.struct([]))])}, "column w is struct.* without fields"),
        ({"k": pa.string(), "V": pa.int64(), "v": pa.int64()}, "columns V, v are the same to Delta"),
        ({"k": pa.string(), "v": pa.string()}, "column v of table .* is int64, of the result string"),
        ({"k": pa.string(), "V": pa.int64()}, "has column v, the result V, which is the same to Delta: rename"),
        ({"k": pa.string(), "w": pa.int64()}, "has no column w; it has k, v"),
    ],
)
@on_disk
def test_columns_are_checked(sink: DeltaSink, columns: dict[str, pa.DataType], match: str) -> None:
    """Columns that do not fit are refused at the start, with an error that lists those of the table."""
    with pytest.raises(InvalidInputError, match=match):
        sink.check(pa.schema(columns), [SLOT])


def made_elsewhere(folder: Path, columns: Mapping[str, Mapping[str, Any]], properties: Mapping[str, str]) -> DeltaSink:
    """Return a sink whose table has what the library itself does not give one; columns are text, with metadata."""
    sink = DeltaSink(folder.as_uri())
    fields = [{"name": name, "type": "string", "nullable": True, "metadata": of} for name, of in columns.items()]
    table = {
        "id": "made-elsewhere",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": fields}),
        "partitionColumns": [],
        "configuration": properties,
    }
    actions = [{"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}}, {"metaData": table}]
    log(sink).mkdir(parents=True)
    (log(sink) / f"{0:020d}.json").write_text("\n".join(map(json.dumps, actions)))
    return sink


def test_tables_with_column_mapping_are_refused(tmp_path: Path) -> None:
    """The library makes empty commits in them, but writes no files: the start passed, and all output waited."""
    of_column = {"delta.columnMapping.id": 1, "delta.columnMapping.physicalName": "col-1"}
    of_table = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "1"}
    mapped = made_elsewhere(tmp_path / "mapped", {"k": of_column}, of_table)
    with pytest.raises(InvalidInputError, match="mode = name, with which nothing can be published"):
        mapped.check(pa.schema({"k": pa.string()}), [SLOT])


def test_tables_that_compute_columns_are_refused(tmp_path: Path) -> None:
    """At the start, and later: the library would store the format itself as the month, and readers miss rows by it."""
    month = {"delta.generationExpression": "date_format(k, 'yyyy-MM')"}
    made = made_elsewhere(tmp_path / "computing", {"k": {}, "month": month}, {})
    columns = pa.schema({"k": pa.string()})
    with pytest.raises(InvalidInputError, match="computes column month"):
        made.check(columns, [SLOT])
    with pytest.raises(UnavailableError, match="computes column month"):
        made.open(SLOT).publish([pa.record_batch([["2026-03-02"]], schema=columns)], marker(0))
    assert made.table().to_pyarrow_table().num_rows == 0


@pytest.mark.parametrize(
    ("properties", "of_column"),
    [
        ({"delta.constraints.half": "length(k) / 2 <= 3"}, {}),
        ({}, {"delta.invariants": json.dumps({"expression": {"expression": "length(k) / 2 <= 3"}})}),
    ],
)
def test_constraints_of_another_sql_are_refused(
    tmp_path: Path, properties: Mapping[str, str], of_column: Mapping[str, str]
) -> None:
    """At the start, and later: seven letters break it, but 7 / 2 is 3 to the library, which would publish them."""
    made = made_elsewhere(tmp_path / "constrained", {"k": of_column}, properties)
    columns = pa.schema({"k": pa.string()})
    with pytest.raises(InvalidInputError, match=r"that only Spark can check: length\(k\) / 2 <= 3"):
        made.check(columns, [SLOT])
    with pytest.raises(UnavailableError, match="that only Spark can check"):
        made.open(SLOT).publish([pa.record_batch([["seven.."]], schema=columns)], marker(0))
    assert made.table().to_pyarrow_table().num_rows == 0


def test_texts_are_not_longer_than_a_column_allows(tmp_path: Path) -> None:
    """To the library each is a string; to Spark, which checks as it writes, this one has three characters at most."""
    limited = {"__CHAR_VARCHAR_TYPE_STRING": "varchar(3)"}
    made = made_elsewhere(tmp_path / "limited", {"k": limited, "other": {}}, {})
    columns = pa.schema({"other": pa.string(), "k": pa.string()})
    made.check(columns, [SLOT])
    publisher = made.open(SLOT)
    publisher.publish([pa.record_batch([["much longer", None], ["äöü", None]], schema=columns)], marker(0))
    with pytest.raises(UnavailableError, match=r"column k .* is varchar\(3\), .* has a text of 4 characters"):
        made.open(SLOT).publish([pa.record_batch([["x"], ["four"]], schema=columns)], marker(1))
    assert made.table().to_pyarrow_table()["k"].to_pylist() == ["äöü", None]


@on_disk
@pytest.mark.parametrize("how", ["constraint", "not null"])
def test_refused_rows_leave_no_files(sink: DeltaSink, how: str) -> None:
    """Each try would add files of the rows before them, for as long as the cause lasts."""
    of_v = COLUMNS.field("v").with_nullable(how == "constraint")
    shutil.rmtree(sink.location)
    small = {"delta.targetFileSize": "1000000"}
    table = DeltaTable.create(sink.location, pa.schema([COLUMNS.field("k"), of_v]), configuration=small)
    if how == "constraint":
        table.alter.add_constraint({"few": "v < 20"})
    many = [
        pa.record_batch({"k": [os.urandom(500).hex() for _ in range(1000)], "v": [value] * 1000}, schema=COLUMNS)
        for value in [*range(20), None if how == "not null" else 20]
    ]
    for _ in range(2):
        publisher = sink.open(SLOT)
        with pytest.raises(UnavailableError, match="1000 rows failed validation"):
            publisher.publish(many, marker(0))
    assert list(Path(sink.location).glob("**/*.parquet*")) == []
    publisher = sink.open(SLOT)
    assert publisher.publish(many[:-1], marker(0)) == 20_000
    assert sorted(seen(sink)) == [value for value in range(20) for _ in range(1000)]


@on_disk
def test_comparisons_are_constraints_like_others(sink: DeltaSink) -> None:
    """Rows that violate them wait, and go on when the constraint is altered."""
    sink.table().alter.add_constraint({"few": "v < 3 and k <> 'x'"})
    sink.check(COLUMNS, [SLOT])
    publish(sink, 0, 1)
    with pytest.raises(UnavailableError, match="1 rows failed validation check"):
        publish(sink, 1, 3)
    sink.table().alter.drop_constraint("few")
    publish(sink, 1, 3)
    assert (last(sink), seen(sink)) == (marker(1), [1, 3])


@pytest.mark.parametrize(
    "path",
    [
        *("file:///data/a#1", "file:///data/a?b", "file://data/a", "file:relative", "s3://b/a#1", "s3:///a", "/data"),
        *(Path("/data"), None),
    ],
)
def test_paths_that_the_library_takes_for_others_are_refused(path: Any) -> None:
    """It leaves out what follows a `#`, and a host: records would go to another folder."""
    with pytest.raises(InvalidInputError, match="path must be s3://bucket/folder or file:///folder"):
        DeltaSink(path)


def test_errors_of_a_path_tell_no_credentials() -> None:
    """A path is refused that has some, and the error leaves them out."""
    with pytest.raises(InvalidInputError, match="without credentials, not 's3://…@bucket/a'"):
        DeltaSink("s3://key:secret@bucket/a")
    with pytest.raises(InvalidInputError, match="without credentials, not 's3://…'"):
        DeltaSink("s3://key:secret/bucket/a")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("aws_endpoint_url", "http://u:s3cret@host:1"),
        ("ENDPOINT", "http://u:p/s3cret@host"),
        ("endpoint", "http://h?s3cret"),
        ("endpoint_url", "s3cret"),
    ],
)
def test_errors_of_an_endpoint_tell_no_credentials(name: str, value: str) -> None:
    """The library quotes an endpoint when it does not answer; with keys of its own it is not looked at before."""
    with pytest.raises(InvalidInputError, match="without credentials and query") as caught:
        DeltaSink("s3://bucket/a", storage_options={"aws_access_key_id": "a", name: value})
    assert "s3cret" not in str(caught.value)


def test_endpoint_of_the_environment_tells_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys in the options, only the library looks at it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://u:s3cret@127.0.0.1:1")
    with pytest.raises(InvalidInputError, match="AWS_ENDPOINT_URL in the environment must be") as caught:
        DeltaSink("s3://bucket/a", storage_options={"aws_access_key_id": "a", "aws_secret_access_key": "b"})
    assert "s3cret" not in str(caught.value)
    DeltaSink("s3://bucket/a", storage_options={"aws_endpoint_url": "http://127.0.0.1:1"})


def test_endpoint_of_another_program_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many containers have such a variable; the library takes it only if there is no other endpoint."""
    monkeypatch.setenv("ENDPOINT", "api.internal:8080")
    with pytest.raises(InvalidInputError, match="ENDPOINT in the environment must be"):
        DeltaSink("s3://bucket/a")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert DeltaSink("s3://bucket/a").options["aws_endpoint_url"] == "http://127.0.0.1:1"


def test_endpoint_of_an_executor_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is repeated as if the store were away: Spark would try a failed task at once."""
    sink = DeltaSink("s3://bucket/a")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "host:1")
    with pytest.raises(UnavailableError, match="on this host AWS_ENDPOINT_URL in the environment must be"):
        sink.open(SLOT)


@pytest.mark.parametrize("name", ["timeout", "aws_conditional_put", "max_retries", "aws_server_side_encryption"])
def test_errors_tell_no_value_of_an_option(name: str) -> None:
    """It may be a key, given to the wrong option; not even the cause tells it."""
    options = {"aws_endpoint_url": "http://127.0.0.1:1", "aws_access_key_id": "a", "aws_secret_access_key": "b"}
    sink = DeltaSink("s3://bucket/a", storage_options={**options, name: "s3cret"})
    with pytest.raises(UnavailableError, match="cannot be read or written") as caught:
        sink.check(COLUMNS, [SLOT])
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("place", ["options", "environment"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"aws_server_side_encryption": "AES256", "aws_sse_kms_key_id": "k"}, {"sse": "AES256"}),
        (
            {"aws_server_side_encryption": "aws:kms", "aws_sse_kms_key_id": "k"},
            {"sse": "aws:kms", "sse_kms_key_id": "k"},
        ),
        ({"aws_server_side_encryption": "sse-c", "aws_sse_customer_key_base64": "k"}, {}),
    ],
)
def test_the_check_encrypts_as_the_library(
    monkeypatch: pytest.MonkeyPatch, place: str, given: dict[str, str], expected: dict[str, str]
) -> None:
    """Policies of many buckets refuse a put that does not ask for it, so no query could start."""
    opened: list[dict[str, Any]] = []

    def refuse(_: str, **options: Any) -> None:
        opened.append(options)
        raise UnavailableError("seen")

    monkeypatch.setattr(delta_sink, "open_store", refuse)
    if place == "environment":
        for name, value in given.items():
            monkeypatch.setenv(name.upper(), value)
    sink = DeltaSink("s3://bucket/a", storage_options=given if place == "options" else {})
    with pytest.raises(UnavailableError, match="seen"):
        sink.check(COLUMNS, [SLOT])
    assert opened == [expected]


def test_options_of_the_store_are_text() -> None:
    """Of others the library's error names none."""
    with pytest.raises(InvalidInputError, match="storage_options has 'timeout' with a int"):
        DeltaSink("s3://bucket/a", storage_options={"timeout": 1})  # type: ignore[dict-item]


def test_password_with_a_slash_in_a_path_is_not_told() -> None:
    """It ends the place of the bucket, which would be the user's name."""
    with pytest.raises(InvalidInputError, match="without credentials, not 's3://…@bucket/a'"):
        DeltaSink("s3://user:p/secret@bucket/a")


@on_disk
def test_required_columns(tmp_path: Path, sink: DeltaSink) -> None:
    """A missing one is found at the start, a null when it comes; after the fix publishing continues."""
    required = pa.schema([pa.field("v", pa.int64(), nullable=False), pa.field("k", pa.string())])
    path = (tmp_path / "required").as_uri()
    DeltaTable.create(tmp_path / "required", required)
    with pytest.raises(InvalidInputError, match="requires column v, which the result does not have"):
        DeltaSink(path).check(pa.schema({"k": pa.string()}), [SLOT])
    made = DeltaSink(path)
    made.check(COLUMNS, [SLOT])
    null = pa.record_batch({"k": ["secret"], "v": [None]}, schema=COLUMNS)
    with pytest.raises(UnavailableError, match="1 rows failed validation check") as refused:
        made.open(SLOT).publish([null], marker(0))
    assert "secret" not in str(refused.value)
    made.table().alter.drop_column_not_null("v")
    assert made.open(SLOT).publish([null], marker(0)) == 1


@on_disk
def test_errors_of_records_keep_their_kind(sink: DeltaSink) -> None:
    """The log's error is raised unchanged, and nothing is published."""

    def broken() -> Iterator[pa.RecordBatch]:
        yield batch(1)
        raise CorruptDataError("object is damaged", object_key="key")

    with pytest.raises(CorruptDataError, match="object is damaged"):
        sink.open(SLOT).publish(broken(), marker(0))
    assert (last(sink), seen(sink)) == (None, [])


@on_disk
def test_a_table_that_was_changed_is_told(sink: DeltaSink) -> None:
    """A column that the table lost, and one that became narrower; the error says what to do."""
    changed = pa.table({"k": pa.array(["x"]), "v": pa.array([1], pa.int32())})
    write_deltalake(sink.location, changed, mode="overwrite", schema_mode="overwrite")
    with pytest.raises(UnavailableError, match=r"column v of table .* is int32 and cannot hold a value of int64"):
        sink.open(SLOT).publish([batch(1 << 40)], marker(0))
    write_deltalake(sink.location, changed.select(["v"]), mode="overwrite", schema_mode="overwrite")
    with pytest.raises(UnavailableError, match="no longer has column k: add it to the table again"):
        sink.open(SLOT).publish([batch(1)], marker(0))
    assert last(sink) is None


@on_disk
@pytest.mark.parametrize(
    ("given", "there"),
    [
        (pa.array([0.1]), pa.float32()),
        (pa.array([0.125]), pa.decimal128(9, 2)),
        (pa.array([Decimal("123456789.123456")], pa.decimal128(15, 6)), pa.float64()),
        (pa.array([1], pa.timestamp("us", "Asia/Tokyo")), pa.timestamp("us")),
        (pa.array([1], pa.timestamp("us")), pa.timestamp("us", "UTC")),
        (pa.array([1], pa.timestamp("us")), pa.date32()),
        (pa.array([[{"a": 1, "b": 2}]]), pa.list_(pa.struct({"a": pa.int64()}))),
        (pa.array([{"a": 1, "b": 2}]), pa.struct({"a": pa.int64(), "c": pa.int64()})),
        (pa.array([3]), pa.bool_()),
    ],
    ids=str,
)
def test_a_table_that_was_altered_takes_no_other_values(sink: DeltaSink, given: pa.Array, there: pa.DataType) -> None:
    """A cast would round them, move them in time or drop fields; they wait until the table has their type again."""

    def alter(kind: pa.DataType) -> None:
        changed = pa.table({"v": pa.nulls(1, kind)}).slice(1)
        write_deltalake(sink.location, changed, mode="overwrite", schema_mode="overwrite")

    records = pa.record_batch({"v": given})
    alter(there)
    with pytest.raises(UnavailableError, match=r"column v of table .*, and unpublished output has .* would change"):
        sink.open(SLOT).publish([records], marker(0))
    alter(given.type)
    sink.open(SLOT).publish([records], marker(0))
    assert sink.table().to_pyarrow_table()["v"].cast(given.type).to_pylist() == given.to_pylist()


@on_disk
@pytest.mark.parametrize(
    ("given", "altered", "match"),
    [
        (pa.binary(), "partitions", "x is binary, whose values readers could not read"),
        (pa.decimal128(10, 2), "partitions", "x is decimal128"),
        (pa.timestamp("us", "UTC"), "partitions", "cast it to a date"),
        (pa.decimal128(30, 2), "statistics", "more than 15 digits.*'delta.dataSkippingStatsColumns': 'k,other'"),
    ],
    ids=["bytes", "fractions", "moments", "digits"],
)
def test_a_table_that_was_altered_stays_readable(sink: DeltaSink, given: pa.DataType, altered: str, match: str) -> None:
    """Partitions and statistics by which readers would find other values, or none, are seen at each publish."""
    columns = pa.schema({"k": pa.string(), "x": given, "other": pa.string()})
    made, slot = replace(sink, path=f"{sink.path}-altered"), replace(SLOT, columns=columns)
    made.check(columns, [slot])
    if altered == "partitions":
        empty = columns.empty_table()
        write_deltalake(made.location, empty, mode="overwrite", schema_mode="overwrite", partition_by=["x"])
    else:
        made.table().alter.set_table_properties({"delta.dataSkippingStatsColumns": "k,x,other"})
    rows = pa.record_batch({"k": ["a"], "x": pa.array([None], given)})
    publisher = made.open(slot)
    with pytest.raises(UnavailableError, match=match):
        publisher.publish([rows], marker(0))
    publisher.publish([rows.select(["k"])], marker(0))
    assert last(made) == marker(0), "without the column it is null"


@on_disk
def test_a_column_that_was_widened_takes_narrower_values(sink: DeltaSink) -> None:
    """A type that keeps every value needs no repair; a whole number that a float cannot hold is refused."""
    wide = pa.table({"i": pa.array([], pa.float64()), "f": pa.array([], pa.float64())})
    write_deltalake(sink.location, wide, mode="overwrite", schema_mode="overwrite")
    for number, value in enumerate((7, 2**53 + 1)):
        narrow = pa.record_batch({"i": [value], "f": pa.array([0.1], pa.float32())})
        with nullcontext() if number == 0 else pytest.raises(UnavailableError, match="cannot hold a value of int64"):
            sink.open(SLOT).publish([narrow], marker(number))
    assert sink.table().to_pyarrow_table()["i"].to_pylist() == [7]


def test_tables_that_cannot_be_written(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bucket, and with options that contradict each other."""
    for name, value in s3.env().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnavailableError, match="s3://nobody/out cannot be written"):
        DeltaSink("s3://nobody/out").check(COLUMNS, [SLOT])
    with pytest.raises(UnavailableError, match="cannot be read or written"):
        DeltaSink("s3://bucket/nothing").open(SLOT)
    for wrong in ({"path": "gs://x/y"}, {"compression": "zip"}, {"partition_by": "day"}):
        with pytest.raises(InvalidInputError):
            DeltaSink(**{"path": "file:///x", **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["[x]", "a^b", "a|b", "a\\b", "a%25b", "a\tb"])
def test_folders_that_the_library_cannot_write_are_refused(tmp_path: Path, name: str) -> None:
    """It panics when it writes a file, long after the start."""
    with pytest.raises(InvalidInputError, match="to which the library cannot write"):
        DeltaSink((tmp_path / name).as_uri())


@on_disk
def test_foreign_transactions_are_errors(sink: DeltaSink) -> None:
    """A marker of which a part is missing is never taken for another one."""
    publish(sink, 0, 1)
    newest = max(log(sink).glob("*.json"))
    lines = newest.read_text().splitlines()
    newest.write_text("\n".join(line for line in lines if "dstl/out/uid/1/2" not in line))
    with pytest.raises(CorruptDataError, match="are not those of one commit"):
        sink.open(SLOT)


def test_a_later_job_of_the_name_begins_anew(sink: DeltaSink) -> None:
    """Markers of a deleted job say nothing of what its successor has published."""
    publish(sink, 7, 1)
    assert sink.open(Slot("job", "other", "out", 1, COLUMNS)).last_published() is None


@pytest.mark.timeout(30)  # the library's own limit is longer
def test_other_threads_go_on_while_the_store_hangs() -> None:
    """A start that waits for a store which accepts and never answers does not stop the driver's other queries."""
    with socket.create_server(("127.0.0.1", 0)) as hung, ThreadPoolExecutor(1) as pool:
        hung.settimeout(0.1)
        endpoint = f"http://127.0.0.1:{hung.getsockname()[1]}"
        options = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "aws_region": "us-east-1"}
        options |= {"aws_endpoint_url": endpoint, "timeout": "60s", "max_retries": "0"}
        checked = pool.submit(DeltaSink("s3://bucket/out", storage_options=options).check, COLUMNS, [SLOT])
        while not checked.done():  # each request hangs until this thread, which must go on, ends it
            with suppress(TimeoutError):
                hung.accept()[0].close()
        with pytest.raises(UnavailableError, match="cannot be read"):
            checked.result()
