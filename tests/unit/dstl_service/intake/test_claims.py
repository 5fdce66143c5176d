"""Claims of requests - handles, epochs, jobs - take effect once the store confirms them, and do no harm before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, cast

import pytest
from fastapi import FastAPI
from httpx2 import Response

from dstl_service.formats.checkpoint_record import CheckpointRecord, encode_record
from dstl_service.intake.change_sets import BatchSettings
from dstl_service.intake.notes import NOTES_MAX
from storage.errors import NotFoundError
from storage.key_groups import KeyGroupRange
from storage.memory_store import MemoryStore
from storage.model import ChangeSetId, ObjectInfo, Segment, Writer
from storage.segment_format import encode_object
from storage.testing import Fault, FaultKind, FaultyStore, RecordingStore
from tests.unit.dstl_service.http_life import PATIENT, Life, service

pytestmark = pytest.mark.timeout(180)

HUGE = 2**53 - 1


def kind_of(answer: Any) -> tuple[int, str]:
    """Return the status and kind of an error's answer."""
    return answer.status_code, answer.json().get("kind", "")


def durable(life: Life, payload: bytes = b"one", **changes: Any) -> dict[str, Any]:
    """Return the reference of a stored set with its handle, as sent by a task whose sidecar is unreachable."""
    ref = life.append(payload, **changes)
    return {**ref, "handle": life.persist(ref).json()["handles"][0]}


def stored(store: MemoryStore, prefix: str = "") -> list[str]:
    """Return the stored keys."""
    return [info.key for info in store.list(prefix)]


def set_id(sqn: int, epoch: int, job: str = "job") -> ChangeSetId:
    """Return the identity of a change set."""
    return ChangeSetId(job, "op", 0, Writer(epoch, 1), 0, sqn)


class SlowLooks(MemoryStore):
    """A store that describes the objects of the job `slow` only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.answer = threading.Event(), threading.Event()

    def head(self, key: str) -> ObjectInfo:
        """Describe an object, or wait."""
        if key.startswith("slow/"):
            self.asked.set()
            self.answer.wait(120)
        return super().head(key)


class TestHandles:
    """I5: a checkpoint names only objects that were verified."""

    @pytest.mark.parametrize(
        ("change", "answer"),
        [
            ({"object": "job/segments/host/missing.seg"}, (410, "lost_changes")),
            ({"object": "job/segments/../../other/segments/x.seg"}, (400, "invalid_input")),
            ({"object": "job/segments/host/../1.seg"}, (400, "invalid_input")),
            ({"object": "job/segments/host/sub/1.seg"}, (400, "invalid_input")),
            ({"object": "job/segments/host/1.json"}, (400, "invalid_input")),
            ({"object": "jobs/segments/host/1.seg"}, (400, "invalid_input")),
            ({"object": "job/segments/" + "x" * 1000 + "/1.seg"}, (400, "invalid_input")),
            ({"object_size": 4096}, (400, "invalid_input")),
            ({"offset": 33}, (400, "invalid_input")),
            ({"checksum": "0" * 16}, (400, "invalid_input")),
            ({"key_groups": "00000-00001"}, (400, "invalid_input")),
            ({"kind": "base"}, (400, "invalid_input")),
        ],
        ids=[
            "missing",
            "dots",
            "dots-inside",
            "deeper",
            "other-kind",
            "other-job",
            "long",
            "size",
            "offset",
            "checksum",
            "groups",
            "base",
        ],
    )
    def test_forged_handle_makes_no_checkpoint(self, change: dict[str, Any], answer: tuple[int, str]) -> None:
        """A handle that leads elsewhere, to nothing, or to other bytes than it says is refused; nothing is kept."""
        with service(MemoryStore()) as life:
            life.open()
            ref = durable(life)
            forged = {**ref, "handle": {**ref["handle"], **change}}

            assert kind_of(life.complete_raw(0, None, forged)) == answer
            assert life.client.get(f"{life.path}/checkpoints").json() == []
            life.complete(0, None, ref)

    def test_object_of_other_content_is_refused(self) -> None:
        """An object of the right name and size that holds another set does not match its handle."""
        store = MemoryStore()
        with service(store) as life:
            life.open()
            ref = durable(life)
        for key in stored(store, "job/segments/"):
            store.put(key, b"x" * store.head(key).size_bytes)
        with service(store) as life:
            life.epoch = 1
            assert kind_of(life.complete_raw(0, None, ref)) == (400, "invalid_input")

    def test_each_object_is_looked_at_once(self) -> None:
        """However many handles point into an object, and however often they arrive, it is checked once."""
        store = RecordingStore(MemoryStore())
        with service(store) as life:
            life.open()
            refs = [life.append(bytes([65 + sqn]), sqn=sqn) for sqn in range(5)]
            handles = life.persist(*refs).json()["handles"]
            given = [{**ref, "handle": handle} for ref, handle in zip(refs, handles, strict=True)]
            store.clear()
            assert life.persist(*given, wait=False).status_code == 200
            first = life.complete(0, None, *given)

            assert life.restore(first)[1] == [b"A", b"B", b"C", b"D", b"E"]
            assert store.count("head", "job/segments/*") == 1

    def test_own_sets_are_not_looked_at(self) -> None:
        """A checkpoint of sets that this service uploads itself costs no check at the store."""
        store = RecordingStore(MemoryStore())
        with service(store) as life:
            life.open()
            store.clear()
            life.complete(0, None, life.append(b"one"))

            assert store.count("head", "job/segments/*") + store.count("get_range", "job/segments/*") == 0

    def test_look_that_fails_is_repeated(self) -> None:
        """I7: a failed check costs a retry, not the checkpoint."""
        store = FaultyStore(MemoryStore())
        with service(store) as life:
            life.open()
            ref = durable(life)
            store.inject(Fault("head", FaultKind.FAIL_BEFORE, "job/segments/*"))
            assert life.complete_raw(0, None, ref).status_code == 503
            life.complete(0, None, ref)


class TestEpochs:
    """I4: an epoch is accepted when the store has it."""

    @pytest.mark.parametrize("way", ["append", "damaged", "begin", "abort", "flush", "complete", "persist"])
    @pytest.mark.parametrize("claimed", [2, HUGE], ids=["next", "huge"])
    def test_claimed_epoch_fences_nobody(self, way: str, claimed: int) -> None:
        """Any request that claims an epoch that does not exist is refused, and the driver continues."""
        with service(MemoryStore()) as life:
            life.open()
            ref = life.append(b"one")
            stranger = Life(life.client)
            stranger.epoch = claimed
            body = {"epoch": claimed, "uid": "u", "base": None, "refs": [], "operators": []}
            ways: dict[str, Callable[[], Response]] = {
                "append": stranger.append_raw,
                "damaged": lambda: stranger.append_raw(checksum="0" * 16),
                "begin": lambda: stranger.begin(0),
                "abort": lambda: stranger.abort(0),
                "flush": lambda: life.client.post(f"{life.path}/checkpoints/0/flush", json=body),
                "complete": lambda: life.client.post(f"{life.path}/checkpoints/0/complete", json=body),
                "persist": lambda: stranger.persist({**ref, "epoch": claimed}),
            }
            answer = ways[way]()

            assert kind_of(answer) == (404, "not_found"), answer.text
            life.complete(0, None, ref)

    def test_new_epoch_is_looked_up_once(self) -> None:
        """A host that only receives sets asks the store once for a new driver's epoch, and fences the older one."""
        store = RecordingStore(MemoryStore())
        with service(store) as coordinator, service(store) as sidecar:
            coordinator.open()
            sidecar.epoch = coordinator.epoch
            store.clear()
            for sqn in range(5):
                sidecar.append(bytes([sqn]), sqn=sqn)
            assert store.count("head", "job/epochs/*") == 1
            coordinator.open()
            sidecar.append(epoch=2)

            assert kind_of(sidecar.append_raw(epoch=1)) == (409, "fenced")
            assert store.count("head", "job/epochs/*") == 2

    def test_claims_of_one_job_take_one_thread(self) -> None:
        """While the store is slow, claims about one job wait for each other, and another job opens."""
        store = SlowLooks()
        with service(store, io_threads=2) as life:
            owned = life.parts.jobs.owned
            claims = [life.portal.start_task_soon(owned, "slow", epoch) for epoch in range(1, 20)]
            try:
                assert store.asked.wait(60)
                life.open()
                life.complete(0, None, life.append(b"one"))
            finally:
                store.answer.set()
            for claim in claims:
                with pytest.raises(NotFoundError, match="has no epoch"):
                    claim.result(60)


class TestUnknownJobs:
    """For a job that was never opened nothing is stored, and nothing is kept."""

    def test_unknown_job_leaves_nothing(self) -> None:
        """Sets and notes for a job that does not exist are refused, and the error says what to do."""
        store = MemoryStore()
        with service(store, shutdown_timeout_s=1) as life:
            known = Life(life.client, "known")
            known.open()
            note = known.complete(0, None)
            assert note
            before = stored(store)
            life.epoch = 1
            answers = [life.append_raw(), life.append_raw(epoch=0), life.append_raw(preemptive="true")]
            ref = {**known.append(checkpoint_id=1), "service_id": "other"}
            answers.append(life.persist(ref))

            assert [kind_of(answer) for answer in answers] == [(404, "not_found")] * 4
            assert "open the job first" in answers[0].json()["message"]
            assert "job" not in life.client.get("/v1/info").json()["jobs"]
        assert [key for key in stored(store) if key not in before and not key.startswith("known/")] == []

    def test_unknown_job_takes_no_note(self) -> None:
        """A note without sets would be an object of its own, even for a job that does not exist."""
        store = MemoryStore()
        with service(store) as life:
            note = CheckpointRecord("job", "uid", 128, 0, (), uid="u", epoch=1)
            body = {"epoch": 1, "refs": [], "note": str(note.to_segment().payload, "ascii")}
            answer = life.client.post(f"{life.path}/persist", json=body)

            assert kind_of(answer) == (404, "not_found")
        assert stored(store) == []


def test_object_in_a_payload_is_no_object() -> None:
    """A payload that looks like a whole object is not accepted as one: the size of the real object is compared."""
    with service(MemoryStore()) as life:
        life.open()
        ref = life.append(b"one")
        inner, entries = encode_object([Segment.of(set_id(1, life.epoch), KeyGroupRange(0, 127), 1, b"evil")])
        carried = durable(life, b"".join(inner), sqn=2)
        handle = carried["handle"]
        forged = {
            **life.append(b"evil", sqn=1),
            "handle": {
                **handle,
                "sqn": 1,
                "offset": entries[0].offset_bytes,
                "size": entries[0].size_bytes,
                "checksum": f"{entries[0].checksum:016x}",
                "object_size": sum(map(len, inner)),
            },
        }
        assert kind_of(life.complete_raw(0, None, ref, forged)) == (400, "invalid_input")


def test_note_is_stored_as_it_came() -> None:
    """B9: a note sent by a coordinator is parsed in a thread, and stored without being rewritten."""
    store = MemoryStore()
    with service(store) as life:
        opened = life.open()
        text = encode_record(
            CheckpointRecord("job", opened["job_uid"], 128, 0, (), uid="u", epoch=1, offsets="x" * 300_000)
        ).decode()
        spaced = text.replace('"format":', '"format": ')
        body = {"epoch": 1, "refs": [], "note": spaced}
        (handle,) = life.client.post(f"{life.path}/persist", json=body).json()["handles"]

    at = handle["offset"]
    assert store.get(handle["object"])[at : at + handle["size"]] == spaced.encode()


def test_notes_that_cannot_be_stored_are_limited() -> None:
    """I9: while the store hangs, only a limited number of a job's notes take memory."""
    store = FaultyStore(MemoryStore())
    with service(store, upload=PATIENT) as life:
        opened = life.open()
        store.inject(Fault("put", FaultKind.DELAY, "job/segments/*", times=None))
        statuses = []
        for number in range(NOTES_MAX + 1):
            note = CheckpointRecord("job", opened["job_uid"], 128, 0, (), uid=f"u{number}", epoch=1)
            body = {"epoch": 1, "refs": [], "note": encode_record(note).decode(), "wait": False}
            statuses.append(life.client.post(f"{life.path}/persist", json=body).status_code)
        store.heal()

        assert statuses == [200] * NOTES_MAX + [429]


def test_body_that_arrives_again_counts_beside_itself() -> None:
    """I9: one resent body of a held set at a time arrives without room, and only one of the same size."""
    with service(MemoryStore(), batch=BatchSettings(delay_ms=1, size_bytes=10_000, in_flight_bytes_max=10_000)) as life:
        life.open()
        life.append(b"x" * 900)
        parts = cast("FastAPI", life.client.app).state.parts

        async def free_places(size_bytes: int) -> list[bool]:
            async with AsyncExitStack() as stack:
                return [
                    (await stack.enter_async_context(parts.intake.room_for(set_id(0, 1), size_bytes))).room is None
                    for _ in range(2)
                ]

        assert life.portal.call(free_places, 900) == [True, False]
