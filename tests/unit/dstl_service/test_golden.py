"""
Formats on disk and over HTTP, byte for byte: each value here is written as the file of its name in ``tests/golden``.

A failure means that this program no longer writes, or reads, the bytes of older programs. Formats only grow: a new
field belongs into a new file, beside the existing ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from dstl_service.formats.checkpoint_record import (
    CheckpointRecord,
    NotedSet,
    decode_record,
    encode_record,
    record_of,
    record_of_rewind,
)
from dstl_service.formats.keys import EpochRecord, JobRecord, Place, Rewind, decode_job, encode_job
from dstl_service.formats.manifest import Manifest, ManifestKind, StateView, decode_manifest, encode_manifest
from dstl_service.formats.materialization_index import decode_index, encode_index
from dstl_service.formats.under_way import UnderWay, UnderWaySnapshot
from dstl_service.wire import ChangeSetRef, CheckpointRef, CompleteRequest
from storage.key_groups import KeyGroupRange
from storage.memory_store import MemoryStore
from storage.object_store import ObjectStore
from storage.segment_format import decode_object, encode_object
from storage.testing import FakeClock, FakeIds
from tests.unit.dstl_service.http_life import Life, service
from tests.unit.dstl_service.samples import handles_of, manifest, opened, segment
from tests.unit.dstl_service.snapshots import GROUPS, index_of, store_snapshot

GOLDEN = Path(__file__).resolve().parents[2] / "golden"

_ID = re.compile(rb"000[12]0{20}[0-9a-f]{8}")

BASE = CheckpointRef(6, 2, "base-uid")
SEGMENTS = [segment(0, b"first"), segment(1, b"second"), segment(0, b"third", partition=1)]
INDEX = index_of(BASE, uid="made", parents=("parent",))
UNDER_WAY = UnderWay((UnderWaySnapshot("op", GROUPS, BASE, "stored-soon"),), ("compacted-soon",))

DELTA = replace(
    manifest(7, base=BASE, segments=handles_of(SEGMENTS)),
    note=handles_of([segment(checkpoint_id=7)], "job/segments/host/note.seg")[0],
    under_way=UNDER_WAY,
    closed_ms=1_699_999_999_000,
)
COMPLETE = replace(
    manifest(8, base=DELTA.ref, kind=ManifestKind.COMPLETE, earlier=handles_of(SEGMENTS)),
    materializations=(INDEX.handle("job"),),
    rewound_from=CheckpointRef(9, 0, "given-up"),
    kept_by="call",
)
FENCE = Manifest(ManifestKind.FENCE, "job-uid", 7, 3, 1_700_000_000_001, uid="fence-uid", epoch=2)
MANIFESTS = {"manifest-delta": DELTA, "manifest-complete": COMPLETE, "manifest-fence": FENCE}

REF = ChangeSetRef("op", 7, 3, 7, 0, 1, 6, "service", "http://host:1", checksum="0123456789abcdef")
REQUEST = CompleteRequest(3, "uid", BASE, [REF, replace(REF, sqn=2, checksum=None)], list(DELTA.operators))
RECORDS = {
    "record-delta": record_of("job", "job-uid", 128, 7, REQUEST, None),
    "record-complete": record_of(
        "job",
        "job-uid",
        128,
        7,
        replace(REQUEST, query_id="query", offsets='{"batch":"ü"}', closed_ms=5),
        StateView(COMPLETE.materializations, list(COMPLETE.earlier)),
    ),
    "record-rewind": record_of_rewind("job", 128, COMPLETE),
}

EPOCHS = {
    "epoch-first": EpochRecord(1, "driver", "uid", 1_700_000_000_000),
    "epoch-rewind": EpochRecord(
        4, "rewind", "uid", 1_700_000_000_000, 1, Place(0, 7, 2), Place(0, 8, 1), Rewind("before", 3, 0)
    ),
}


def compare(name: str, data: bytes) -> None:
    """Compare bytes with the file that holds them."""
    assert data == (GOLDEN / name).read_bytes()


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_is_golden(name: str) -> None:
    """A manifest of each kind has the same bytes as before, and is read from them."""
    compare(f"{name}.json", encode_manifest(MANIFESTS[name]))

    assert decode_manifest((GOLDEN / f"{name}.json").read_bytes(), name) == MANIFESTS[name]


@pytest.mark.parametrize("name", RECORDS)
def test_checkpoint_record_is_golden(name: str) -> None:
    """A checkpoint's note has the same bytes as before, and is read from them."""
    compare(f"{name}.json", encode_record(RECORDS[name]))

    assert decode_record((GOLDEN / f"{name}.json").read_bytes(), name) == RECORDS[name]


@pytest.mark.parametrize("name", EPOCHS)
def test_epoch_is_golden(name: str) -> None:
    """The record of an epoch has the same bytes as before, and is read from them, and without a checksum."""
    compare(f"{name}-checksum.json", EPOCHS[name].encode())

    for file in (f"{name}-checksum.json", f"{name}.json"):
        assert EpochRecord.decode((GOLDEN / file).read_bytes(), name) == EPOCHS[name]


def test_job_is_golden() -> None:
    """The record of a job has the same bytes as before, and is read from them, and without a checksum."""
    compare("job-checksum.json", encode_job("job-uid", 128))

    for file in ("job-checksum.json", "job.json"):
        assert decode_job((GOLDEN / file).read_bytes(), "job.json") == JobRecord("job-uid", 128)


def test_materialization_index_is_golden() -> None:
    """The index of a materialization has the same bytes as before, and is read from them."""
    compare("materialization-index.json", encode_index(INDEX))

    assert decode_index((GOLDEN / "materialization-index.json").read_bytes(), "index") == INDEX


def test_segment_object_is_golden() -> None:
    """A segment object has the same bytes as before, note included, and is read from them."""
    note = CheckpointRecord("job", "uid", 128, 1, (NotedSet(SEGMENTS[0].id, 1),), uid="u", epoch=3).to_segment()
    segments = sorted([*SEGMENTS, note], key=lambda item: (item.id.operator, item.id.partition, item.id.sqn))
    compare("segment-object.seg", b"".join(bytes(part) for part in encode_object(segments)[0]))

    found = decode_object((GOLDEN / "segment-object.seg").read_bytes(), "object")
    assert [(entry.id, bytes(payload)) for entry, payload in found] == [(item.id, item.payload) for item in segments]


class TestRestoreFrames:
    """The answers to a restore."""

    def test_segments_are_golden(self) -> None:
        """Change sets, one of them for some of its key groups only, and the end."""
        with _job(MemoryStore()) as (life, refs):
            compare("restore-segments.frames", _restored(life, refs[1], last_key_group=99))
            compare("restore-step.frames", _restored(life, refs[1], refs[0]))

    def test_snapshot_is_golden(self) -> None:
        """A snapshot with its files, the change set after it that counts in part, and the next one."""
        store = MemoryStore()
        with _job(store) as (_, refs):
            pass
        jobs = opened(store)
        before = jobs.newest()
        assert before is not None
        index = index_of(CheckpointRef(**refs[0]), job_uid=jobs.job_uid, key_groups=KeyGroupRange(0, 63))
        first = jobs.resolve(CheckpointRef(**refs[0])).segments
        made = replace(
            manifest(2, before.epoch, before.ref, job_uid=jobs.job_uid, kind=ManifestKind.COMPLETE),
            earlier=(*first, *before.segments),
            materializations=(store_snapshot(store, index),),
        )
        jobs.create_manifest(made)
        with service(store, FakeClock(), ids=FakeIds(2)) as fresh:
            compare("restore-snapshot.frames", _restored(fresh, asdict(made.ref)))

    def test_read_is_golden(self) -> None:
        """Change sets of a checkpoint that does not exist yet."""
        with _job(MemoryStore()) as (life, _):
            ref = life.append(b"three", checkpoint_id=2)
            answer = life.client.post(f"{life.path}/read", json={"epoch": life.epoch, "refs": [ref]})
            compare("read.frames", answer.content)

    def test_errors_are_golden(self) -> None:
        """An unreadable object: an error on an empty table, and the notice that the restore must start again."""
        store = MemoryStore()
        with _job(store) as (_, refs):
            pass
        with service(store, FakeClock(), ids=FakeIds(2)) as fresh:
            store.delete([info.key for info in store.list("job/segments/")])
            compare("restore-error.frames", _restored(fresh, refs[1]))
            compare("restore-gone.frames", _restored(fresh, refs[1], refs[0]))


@contextmanager
def _job(store: ObjectStore) -> Iterator[tuple[Life, list[dict[str, Any]]]]:
    """Run a service with a job of two checkpoints, of one change set each."""
    with service(store, FakeClock(), ids=FakeIds(1)) as life:
        life.open()
        refs = [life.complete(0, None, life.append(b"one"))]
        refs.append(life.complete(1, refs[0], life.append(b"two", checkpoint_id=1)))
        yield life, refs


def _restored(life: Life, want: dict[str, Any], at: dict[str, Any] | None = None, **changes: Any) -> bytes:
    answer = life.restore_raw(want, at, **changes)
    assert answer.status_code == 200, answer.text
    return _named_in_order(answer.content)


def _named_in_order(stream: bytes) -> bytes:
    """Return the stream with its unique ids renamed by first appearance: the order of requests does not matter."""
    names: dict[bytes, bytes] = {}
    return _ID.sub(lambda found: names.setdefault(found[0], b"%032x" % len(names)), stream)
