"""Publishing Parquet files: what a reader that lists the folder sees, on a disk and on a real S3 server."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend_client.sinks.parquet import ParquetSink
from backend_client.sinks.protocol import Marker, Slot
from dstl_service.wire import BRANCH_GENERATIONS, CheckpointRef
from storage.errors import CorruptDataError, FencedError, InvalidInputError
from storage.open import open_store
from tools.servers.s3_server import S3Server

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

COLUMNS = pa.schema({"k": pa.string(), "v": pa.int64()})
SLOT = Slot("job", "uid", "out", 1, COLUMNS)


@pytest.fixture(params=["disk", "s3"])
def sink(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ParquetSink]:
    """A sink in an empty folder."""
    if request.param == "disk":
        yield ParquetSink((tmp_path / "out folder").as_uri())
        return
    with S3Server() as server:
        server.create_bucket("bucket")
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        yield ParquetSink("s3://bucket/out")


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


def seen(sink: ParquetSink) -> list[int]:
    """Return the values in all files that do not count as hidden."""
    store = open_store(sink.path)
    names = [info.key for info in store.list("") if not info.key.startswith(("_", "."))]
    assert all(name.endswith(".parquet") for name in names)
    return [value for name in sorted(names) for value in pq.read_table(io.BytesIO(store.get(name)))["v"].to_pylist()]


def test_each_checkpoint_is_one_file_with_its_marker(sink: ParquetSink) -> None:
    """Records in order; a checkpoint without records makes no file, but the first of a branch does."""
    sink.check(COLUMNS, [SLOT])
    assert (last(sink), seen(sink)) == (None, [])
    publish(sink, 0, 1, 2)
    publish(sink, 1)
    assert last(sink) == marker(0), "the next marker says more"
    publish(sink, 2, 3)
    assert (last(sink), seen(sink)) == (marker(2), [1, 2, 3])
    publish(sink, 1, branch=7)
    assert (last(sink), seen(sink)) == (marker(1, 7), [1, 2, 3])


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


@pytest.mark.parametrize("hint", ["0", "5", "900", "x", None])
def test_a_wrong_hint_costs_requests_only(sink: ParquetSink, hint: str | None) -> None:
    """The newest file is found whatever the hint says."""
    for number in range(4):
        publish(sink, number, number)
    store = open_store(sink.path)
    if hint is None:
        store.delete(["_dstl/out-uid-00001"])
    else:
        store.put("_dstl/out-uid-00001", hint.encode())
    assert last(sink) == marker(3)


def test_wide_files(sink: ParquetSink) -> None:
    """The marker is found behind a footer of any length."""
    wide = pa.schema({f"column {number} {'x' * 100}": pa.int64() for number in range(2000)})
    publisher = sink.open(SLOT)
    publisher.publish([pa.RecordBatch.from_pylist([{wide.names[0]: 1}], schema=wide)], marker(0))
    publisher.close()
    assert last(sink) == marker(0)


def test_foreign_files_are_errors(sink: ParquetSink) -> None:
    """A file that the sink did not write is never taken for its own."""
    open_store(sink.path).put("out-uid-00001-000000000000.parquet", b"something else")
    with pytest.raises(CorruptDataError, match="is not a Parquet file"):
        sink.open(SLOT)


def test_columns_are_checked(sink: ParquetSink) -> None:
    """What Parquet cannot store is found at the start."""
    with pytest.raises(InvalidInputError, match="cannot be stored as Parquet"):
        sink.check(pa.schema({"d": pa.month_day_nano_interval()}), [SLOT])


def test_a_later_job_of_the_name_begins_anew(sink: ParquetSink) -> None:
    """Files of a deleted job say nothing of what its successor has published."""
    publish(sink, 7, 1)
    publisher = sink.open(Slot("job", "other", "out", 1, COLUMNS))
    assert publisher.last_published() is None
    publisher.close()
