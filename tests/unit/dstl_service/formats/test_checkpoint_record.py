"""Notes: what segment objects record about the checkpoints of their sets."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from dstl_service.collection.garbage_collector import collect_garbage
from dstl_service.formats.checkpoint_record import CheckpointRecord, NotedSet, decode_record, encode_record, read_record
from dstl_service.formats.manifest import StateView
from dstl_service.wire import NOTE_OPERATOR, CheckpointRef, validate_operator
from storage.errors import CorruptDataError, InvalidInputError
from storage.key_groups import KeyGroupRange
from storage.memory_store import MemoryStore
from storage.model import MaterializationHandle, SegmentHandle
from storage.object_store import ObjectStore
from storage.segment_reader import read_index, read_payload
from storage.testing import FakeClock, RecordingStore
from tests.unit.dstl_service.http_life import Life, service
from tests.unit.dstl_service.samples import handles_of, manifest, opened, segment

SNAPSHOT = MaterializationHandle("op", KeyGroupRange(0, 9), 3, "m", "job/materialized/op/m.json", 7)
RECORD = CheckpointRecord(
    job="job",
    job_uid="job-uid",
    max_parallelism=128,
    checkpoint_id=1,
    uid="try",
    epoch=3,
    base=CheckpointRef(0, 1, "base"),
    query_id="query",
    offsets='{"batch":"ü\ud800"}',
    operators=manifest().operators,
    sets=(NotedSet(segment().id, segment().checksum), NotedSet(segment(1).id, None)),
    start=StateView((SNAPSHOT,), handles_of([segment(2)])),
)


def records_in(store: ObjectStore) -> list[CheckpointRecord]:
    """Return all stored notes in the order of their objects."""
    notes = []
    for info in store.list("job/segments/"):
        for entry in read_index(store, info.key, info.size_bytes):
            if entry.id.operator == NOTE_OPERATOR:
                payload = read_payload(store, SegmentHandle(info.key, info.size_bytes, entry))
                notes.append(decode_record(payload, info.key))
    return notes


@pytest.mark.parametrize(
    "note", [RECORD, replace(RECORD, base=None, start=None, sets=(), operators=()), replace(RECORD, closed_ms=-7)]
)
def test_note_survives_round_trip(note: CheckpointRecord) -> None:
    """A note survives encoding and decoding unchanged."""
    assert decode_record(encode_record(note), "object") == note
    assert read_record("job", encode_record(note).decode()) == note


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 100_000,
        encode_record(RECORD)[:-1],
        encode_record(RECORD).replace(b'"format":1', b'"format":99'),
        encode_record(RECORD).replace(b'"max_parallelism":128', b'"max_parallelism":0'),
        encode_record(RECORD).replace(b'"uid":"try"', b'"uid":"../try"'),
        encode_record(replace(RECORD, closed_ms=7)).replace(b'"closed_ms":7', b'"closed_ms":"7"'),
        encode_record(RECORD).replace(b'"op",0,7', b'"../op",0,7'),
        encode_record(RECORD).replace(b'"epoch":3,"base"', b'"epoch":-3,"base"'),
    ],
)
def test_damaged_note_is_reported(data: bytes) -> None:
    """I10: a malformed or newer note is an error that names its object; from a peer, it is refused."""
    with pytest.raises(CorruptDataError, match="the-object"):
        decode_record(data, "the-object")
    with pytest.raises(InvalidInputError):
        read_record("job", data.decode(errors="replace"))


def test_long_note_lets_other_threads_run() -> None:
    """B9: a note is read in pieces, between which other threads run; the garbage collector is off meanwhile."""
    count = 5_000
    note = replace(RECORD, sets=tuple(NotedSet(segment().id, number) for number in range(count)))
    data = encode_record(note)
    pieces, collections = Counter[str](), Counter[str]()
    parsing = False

    def seen(frame: FrameType, event: str, _: object) -> None:
        # Whenever a Python function is called, another thread gets its turn if its time has come.
        nonlocal parsing
        if frame.f_code.co_name == "raw_decode":
            parsing = event == "call"
        elif event == "call":
            pieces["parsed" if parsing else "built"] += 1

    def collected(phase: str, _: dict[str, int]) -> None:
        collections[phase] += 1

    gc.callbacks.append(collected)
    sys.setprofile(seen)
    try:
        decoded = decode_record(data, "object")
    finally:
        sys.setprofile(None)
        gc.callbacks.remove(collected)

    assert decoded == note
    assert min(pieces["parsed"], pieces["built"]) >= count
    assert collections["start"] <= 1  # after it
    assert gc.isenabled()


def test_collections_go_on_after_broken_notes() -> None:
    """Unreadable notes leave the garbage collector on, even if several are read at a time."""

    def read(_: int) -> None:
        with pytest.raises(CorruptDataError):
            decode_record(b"{}", "object")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(read, range(20)))
    assert gc.isenabled()


def test_note_of_other_job_is_refused() -> None:
    """A peer cannot store one job's note among another job's sets."""
    with pytest.raises(InvalidInputError, match="'job' was sent to job 'other'"):
        read_record("other", encode_record(RECORD).decode())


@pytest.mark.parametrize("name", [NOTE_OPERATOR, "_notes", ".x", ""])
def test_reserved_operator_is_refused(name: str) -> None:
    """No user's operator can have the name of the notes' operator."""
    with pytest.raises(InvalidInputError):
        validate_operator(name)
    with service(MemoryStore()) as life:
        life.open()
        assert life.append_raw(operator=name).status_code == 400


def flush(life: Life, checkpoint_id: int, *refs: dict[str, Any], **changes: Any) -> Any:
    """Start the upload of a checkpoint that `Life.complete` completes with the same arguments."""
    operator = {"name": "op", "parallelism": 1, "key_schema": "{}", "states": {}}
    body = {"epoch": life.epoch, "uid": f"e{life.epoch}c{checkpoint_id}", "base": None, "refs": refs}
    body |= {"operators": [operator], "query_id": "query", "offsets": "offsets", **changes}
    return life.client.post(f"{life.path}/checkpoints/{checkpoint_id}/flush", json=body)


@pytest.mark.parametrize("is_flushed", [True, False])
def test_note_shares_object(is_flushed: bool) -> None:
    """I10: a checkpoint's note lies in the object of its sets, flushed before or not."""
    store = RecordingStore(MemoryStore())
    with service(store) as life:
        life.open()
        refs = [life.append(partition=partition) for partition in range(3)]
        if is_flushed:
            assert flush(life, 0, *refs).status_code == 204
        answer = life.complete_raw(0, None, *refs).json()

        assert (answer["objects_written"], store.count("put", "job/segments/*")) == (2, 1)
        assert life.restore(answer["ref"]) == (True, [b"payload"] * 3)
    (note,) = records_in(store)
    jobs = opened(store)
    assert (note.job_uid, note.max_parallelism) == (jobs.job_uid, jobs.max_parallelism)
    assert (note.uid, note.epoch, note.base, note.offsets) == ("e1c0", 1, None, "offsets")
    made = jobs.load(0, answer["ref"]["generation"])
    assert [(noted.id, noted.checksum) for noted in note.sets] == [
        (handle.entry.id, handle.entry.checksum) for handle in made.segments
    ]
    assert made.note is None


def test_changed_request_gets_note_of_its_own() -> None:
    """A checkpoint completed with sets other than the flushed ones has a second note with those sets."""
    store = MemoryStore()
    with service(store) as life:
        life.open()
        flushed, completed = life.append(attempt=1), life.append(attempt=2)
        flush(life, 0, flushed)
        life.persist(flushed)
        life.complete(0, None, completed)

    assert [[noted.id.writer.attempt for noted in note.sets] for note in records_in(store)] == [[1], [2]]


def test_repeated_try_has_new_note() -> None:
    """The note flushed for an abandoned try is not used for the next try."""
    store = MemoryStore()
    with service(store) as life:
        life.open()
        refs = []
        for attempt in (1, 2):
            life.begin(0)
            refs.append(life.append(attempt=attempt))
            flush(life, 0, refs[-1], uid=f"try{attempt}")
        life.complete(0, None, refs[-1], uid="try2")

    assert records_in(store)[-1].uid == "try2"


def test_note_of_empty_checkpoint_is_kept() -> None:
    """I11: a note stored as a separate object is named by its manifest, and never collected."""
    store = MemoryStore()
    with service(store) as life:
        life.open()
        assert life.complete_raw(0, None).json()["objects_written"] == 2
    (key,) = [info.key for info in store.list("job/segments/")]
    collect_garbage(store, opened(store), "job", FakeClock(1 << 50), age_min_ms=0)

    assert [info.key for info in store.list("job/segments/")] == [key]
    assert next(iter(opened(store).completed())).note is not None


def test_note_of_complete_manifest_names_all() -> None:
    """Only the note of a checkpoint with a complete manifest names all that came before."""
    store = MemoryStore()
    with service(store) as life:
        life.open()
        base = None
        for checkpoint_id in range(23):
            base = life.complete(checkpoint_id, base, life.append(checkpoint_id=checkpoint_id))
    starts = {note.checkpoint_id: note.start for note in records_in(store)}

    assert [checkpoint_id for checkpoint_id, start in starts.items() if start is not None] == [0, 20]
    assert starts[20] is not None
    assert [handle.entry.id.checkpoint_id for handle in starts[20].log] == list(range(20))


def test_flush_checks_as_complete_does() -> None:
    """I4: an older driver, a gap and an unknown base are refused before anything is uploaded."""
    store = RecordingStore(MemoryStore())
    with service(store) as life:
        life.open()
        life.open()
        refused = [
            flush(life, 0, epoch=1),
            flush(life, 5),
            flush(life, 1, base={"id": 0, "generation": 0, "uid": "nobody"}),
            flush(life, 0, {**life.append(), "checksum": "no number"}),
        ]

        assert [answer.status_code for answer in refused] == [409, 409, 404, 400]
        assert store.count("put", "job/segments/*") == 0


def test_lost_set_leaves_no_note() -> None:
    """A checkpoint whose set is gone is refused, and no note of it is stored."""
    store = RecordingStore(MemoryStore())
    with service(store) as life:
        life.open()
        ref = life.append()
        life.abort(0)

        assert flush(life, 0, ref).status_code == 410
        assert life.complete_raw(0, None, ref).status_code == 410
        assert store.count("put", "job/segments/*") == 0
