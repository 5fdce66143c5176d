"""The service over HTTP: a checkpoint's life, and each error as seen from outside."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from httpx2 import Response
from starlette.types import Message

from dstl_service.http.errors import HTTP_STATUS
from dstl_service.wire import decode_frames
from storage.errors import ErrorKind, NotFoundError, UnavailableError
from storage.memory_store import MemoryStore
from storage.testing import Fault, FaultKind, FaultyStore, RecordingStore
from tests.unit.dstl_service.http_life import QUICK, Life, samples, service, text

pytestmark = pytest.mark.timeout(30)

SEGMENTS = "*/segments/*"
MANIFESTS = "*/checkpoints/*"


def kind_of(answer: Response) -> str:
    """Return the kind of an error's answer."""
    kind: str = answer.json()["kind"]
    return kind


class TestLife:
    """A checkpoint's life."""

    def test_checkpoint_is_restored(self) -> None:
        """A table gets what was appended and completed, both from nothing and from the checkpoint before."""
        with service(MemoryStore()) as life:
            opened = life.open()
            assert (opened["epoch"], opened["max_parallelism"], opened["latest"]) == (1, 128, None)
            assert life.begin(0).json()["service_id"] == opened["service_id"]
            first = life.complete(0, None, life.append(b"one"), life.append(b"two", sqn=1))
            life.begin(1)
            second = life.complete(1, first, life.append(b"three", checkpoint_id=1))

            assert life.restore(second) == (True, [b"one", b"two", b"three"])
            assert life.restore(second, first) == (False, [b"three"])
            assert life.restore(second, second) == (False, [])

    def test_checkpoint_outlives_process(self) -> None:
        """The service keeps nothing that the store does not: a new process restores and continues."""
        store = MemoryStore()
        with service(store) as life:
            life.open()
            first = life.complete(0, None, life.append(b"one"))
        with service(store) as life:
            assert life.restore(first) == (True, [b"one"])
            opened = life.open()

            assert (opened["epoch"], opened["latest"]["ref"], opened["latest"]["offsets"]) == (2, first, "offsets")
            assert life.restore(life.complete(1, first)) == (True, [b"one"])

    def test_sets_of_all_tasks_share_one_object(self) -> None:
        """However many tasks ended, a checkpoint costs one segment object and one manifest."""
        store = RecordingStore(MemoryStore())
        with service(store) as life:
            life.open()
            refs = [life.append(partition=partition, attempt=partition) for partition in range(20)]
            answer = life.complete_raw(0, None, *refs).json()

            assert answer["objects_written"] == 2
            assert store.count("put", SEGMENTS) == 1

    def test_losing_attempt_is_not_stored(self) -> None:
        """I2: a set of an attempt that Spark did not accept neither reaches the store nor a table."""
        store = RecordingStore(MemoryStore())
        with service(store) as life:
            life.open()
            life.append(b"loser", attempt=1)
            accepted = life.append(b"winner", attempt=2)
            ref = life.complete(0, None, accepted)

            assert life.restore(ref) == (True, [b"winner"])
            assert store.count("put", SEGMENTS) == 1

    def test_two_writers_for_partition_are_refused(self) -> None:
        """I2: a checkpoint that would name two attempts of one partition is not created."""
        with service(MemoryStore()) as life:
            life.open()
            refs = [life.append(b"a", attempt=1), life.append(b"b", attempt=2)]

            assert life.complete_raw(0, None, *refs).status_code == 400
            assert life.client.get(f"{life.path}/checkpoints").json() == []

    def test_second_pass_of_a_closed_batch(self) -> None:
        """I2: in a closed batch a partition has a second writer, whose sets follow the first one's, but no third."""
        with service(MemoryStore()) as life:
            life.open()
            refs = [life.append(b"behind", attempt=11, sqn=1), life.append(b"first", attempt=2)]
            others = [*refs, life.append(b"third", attempt=12, sqn=2)]

            assert life.complete_raw(0, None, *others, closed_ms=7).status_code == 400
            made = life.complete(0, None, *refs, closed_ms=7)
            assert life.restore(made) == (True, [b"first", b"behind"])
            assert life.open()["latest"]["closed_ms"] == 7

    @pytest.mark.parametrize(
        "attempts", [{2: [0], 11: [0]}, {2: [0, 1], 11: [1]}, {2: [1], 11: [0]}, {2: [0], 11: [2]}]
    )
    def test_attempts_of_one_pass_are_not_both_passes(self, attempts: dict[int, list[int]]) -> None:
        """I2: in a closed batch, too, a checkpoint names only the attempt that Spark accepted in each pass."""
        with service(MemoryStore()) as life:
            life.open()
            refs = [life.append(b"set", attempt=attempt, sqn=sqn) for attempt in attempts for sqn in attempts[attempt]]

            refused = life.complete_raw(0, None, *refs, closed_ms=7)
            assert (refused.status_code, "are not numbered consecutively" in refused.text) == (400, True)
            assert life.client.get(f"{life.path}/checkpoints").json() == []

    @pytest.mark.parametrize("stored", [False, True])
    def test_sets_are_given_back(self, stored: bool) -> None:
        """Sets of a checkpoint in progress are read by the tasks that build on them, wherever the sets are."""
        with service(MemoryStore()) as life:
            life.open()
            refs = [life.append(b"one"), life.append(b"two", sqn=1)]
            if stored:
                life.persist(refs[1])

            answer = life.client.post(f"{life.path}/read", json={"epoch": life.epoch, "refs": refs})
            *segments, (end, _) = decode_frames(io.BytesIO(answer.content))

            assert [payload for _, payload in segments] == [b"one", b"two"]
            assert [head["checksum"] for head, _ in segments] == [ref["checksum"] for ref in refs]
            assert end["kind"] == "end"

    def test_sets_are_given_back_by_a_service_that_received_none(self) -> None:
        """A second pass may run on another host than the first, or beside a restarted sidecar."""
        store = MemoryStore()
        with service(store) as there, service(store, host_id="other") as here:
            there.open()
            ref = there.append(b"one")
            stored = {**ref, "handle": there.persist(ref).json()["handles"][0]}

            answer = here.client.post(f"{here.path}/read", json={"epoch": there.epoch, "refs": [stored]})
            (_, payload), _ = decode_frames(io.BytesIO(answer.content))

            assert payload == b"one"

    def test_reading_keeps_no_name_that_was_only_asked_for(self) -> None:
        """Requests that name jobs that do not exist leave nothing in memory."""
        with service(MemoryStore()) as life:
            answer = life.client.post("/v1/jobs/nobody/read", json={"epoch": 1, "refs": []})

            assert answer.status_code == 404
            assert life.client.get("/v1/info").json()["jobs"] == []

    def test_lost_sets_are_not_given_back(self) -> None:
        """A request for a set that is gone, or by a former owner, is refused with the reason."""
        with service(MemoryStore()) as life:
            life.open()
            ref = life.append(b"one")
            life.begin(0)

            body = {"epoch": life.epoch, "refs": [ref]}
            assert life.client.post(f"{life.path}/read", json=body).json()["kind"] == "lost_changes"
            life.open()
            assert life.client.post(f"{life.path}/read", json=body).json()["kind"] == "fenced"

    @pytest.mark.parametrize(("checkpoint_id", "drivers"), [(1, 1), (0, 2)])
    def test_foreign_set_is_refused(self, checkpoint_id: int, drivers: int) -> None:
        """I2: a checkpoint takes only sets of its own id and epoch."""
        with service(MemoryStore()) as life:
            life.open()
            foreign = life.append(checkpoint_id=checkpoint_id)
            foreign_handle = life.persist(foreign).json()["handles"][0]
            for _ in range(1, drivers):
                life.open()

            answer = life.complete_raw(0, None, {**foreign, "handle": foreign_handle})

            assert answer.status_code == 400

    def test_set_of_other_job_is_refused(self) -> None:
        """I2: a handle of another job's set never becomes part of this job's checkpoint."""
        with service(MemoryStore()) as life:
            other = Life(life.client, "other")
            other.open()
            life.open()
            foreign = other.append()
            handle = other.persist(foreign).json()["handles"][0]

            assert life.complete_raw(0, None, {**foreign, "handle": handle}).status_code == 400

    def test_same_set_is_stored_once(self) -> None:
        """I8: a set that is resent after a lost response is one set, before and after it is durable."""
        with service(MemoryStore()) as life:
            life.open()
            first = life.append(b"one")
            assert life.append(b"one") == first
            life.persist(first)
            assert life.append(b"one") == first

            assert life.restore(life.complete(0, None, first)) == (True, [b"one"])

    def test_set_without_wait_becomes_durable(self) -> None:
        """A persist that does not wait starts the upload and returns nothing."""
        with service(MemoryStore()) as life:
            life.open()
            ref = life.append()

            assert life.persist(ref, wait=False).json() == {"handles": []}
            assert len(life.persist(ref).json()["handles"]) == 1

    def test_handle_in_reference_is_taken(self) -> None:
        """A set that its task made durable itself needs no service that still knows it."""
        store = MemoryStore()
        with service(store) as life:
            life.open()
            ref = life.append(b"one")
            handle = life.persist(ref).json()["handles"][0]
        with service(store) as life:
            life.epoch = 1
            first = life.complete(0, None, {**ref, "handle": handle})

            assert life.restore(first) == (True, [b"one"])

    def test_checkpoints_are_listed(self) -> None:
        """The list has every checkpoint, oldest first; one of them is shown with its handles."""
        with service(MemoryStore()) as life:
            life.open()
            first = life.complete(0, None, life.append(b"one"))
            second = life.complete(1, first)
            listed = life.client.get(f"{life.path}/checkpoints").json()
            shown = life.client.get(f"{life.path}/checkpoints/0").json()

            assert [item["ref"] for item in listed] == [first, second]
            assert (shown["checkpoint"], len(shown["handles"])) == (text(first), 1)
            assert life.client.get(f"{life.path}/checkpoints/7").status_code == 404

    def test_first_persist_after_open_waits(self) -> None:
        """A slow first upload of a job that was just opened blocks neither the service nor its health."""
        store = FaultyStore(MemoryStore(), Fault("put", FaultKind.DELAY, SEGMENTS, delay_ms=30))
        with service(store) as life:
            life.open()

            assert len(life.persist(life.append()).json()["handles"]) == 1
            assert life.client.get("/health").json()["status"] == "alive"

    def test_first_persist_after_abort_waits(self) -> None:
        """A persist waits for the upload after an aborted checkpoint like for any other."""
        with service(MemoryStore()) as life:
            life.open()
            life.complete(0, None, life.append())
            life.abort(1)

            assert len(life.persist(life.append(checkpoint_id=1)).json()["handles"]) == 1

    def test_stopping_service_uploads_what_waits(self) -> None:
        """A service that is told to stop uploads the sets that it holds."""
        store = RecordingStore(MemoryStore())
        with service(store) as life:
            life.open()
            life.append()

        assert store.count("put", SEGMENTS) == 1


class TestFailures:
    """Failures, and the state after them."""

    def test_restarted_service_reports_lost_sets(self) -> None:
        """A set that was only received is lost with its process: 410, and the batch can be executed again."""
        store = MemoryStore()
        with service(store) as life:
            life.open()
            lost = life.append(b"lost")
        with service(store) as life:
            life.epoch = 1
            answer = life.complete_raw(0, None, lost)
            assert (answer.status_code, kind_of(answer)) == (410, "lost_changes")

            life.begin(0)
            again = life.complete(0, None, life.append(b"again", attempt=2), uid="second-try")

            assert life.restore(again) == (True, [b"again"])

    @pytest.mark.parametrize("end", ["begin", "abort"])
    def test_forgotten_sets_are_lost(self, end: str) -> None:
        """Sets of an aborted or newly begun checkpoint can no longer be completed."""
        with service(MemoryStore()) as life:
            life.open()
            ref = life.append()
            getattr(life, end)(0)

            assert life.complete_raw(0, None, ref).status_code == 410

    def test_failed_upload_is_repeated(self) -> None:
        """I7: after a failed upload the same sets are uploaded again, and nothing of the checkpoint is missing."""
        store = FaultyStore(MemoryStore(), Fault("put", FaultKind.FAIL_BEFORE, SEGMENTS, times=2))
        with service(store) as life:
            life.open()
            ref = life.append(b"one")
            answer = life.complete_raw(0, None, ref)
            assert (answer.status_code, kind_of(answer)) == (503, "unavailable")
            assert answer.headers["retry-after"] == "1"

            assert life.restore(life.complete(0, None, ref)) == (True, [b"one"])

    def test_failed_upload_fails_one_checkpoint(self) -> None:
        """I7: a checkpoint that was given up after a failed upload does not block the next try."""
        store = FaultyStore(MemoryStore(), Fault("put", FaultKind.FAIL_BEFORE, SEGMENTS, times=2))
        with service(store) as life:
            life.open()
            assert life.complete_raw(0, None, life.append(b"one")).status_code == 503
            life.abort(0)
            life.begin(0)

            ref = life.complete(0, None, life.append(b"two", attempt=2))

            assert life.restore(ref) == (True, [b"two"])

    def test_programming_error_reaches_waiter(self) -> None:
        """An upload that ends with an unforeseen error answers its waiters."""
        fault = Fault("put", FaultKind.FAIL_BEFORE, SEGMENTS, error=lambda: ValueError("bug"))
        with service(FaultyStore(MemoryStore(), fault)) as life:
            life.open()

            assert life.persist(life.append()).status_code == 503

    def test_hung_uploads_block_no_later_one(self) -> None:
        """I6: attempts that hang for ever hold no slot that later uploads need."""
        store = FaultyStore(MemoryStore(), Fault("put", FaultKind.DELAY, SEGMENTS, times=2))
        try:
            with service(store, upload=replace(QUICK, threads=1)) as life:
                life.open()
                ref = life.append()
                assert life.persist(ref).status_code == 503

                assert life.persist(ref).status_code == 200
        finally:
            store.heal()

    @pytest.mark.parametrize("kind", [FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER])
    def test_unanswered_manifest_can_be_repeated(self, kind: FaultKind) -> None:
        """I5: a manifest whose PUT failed or was not answered exists once after the driver repeats its request."""
        store = FaultyStore(MemoryStore())
        with service(store) as life:
            life.open()
            store.inject(Fault("put", kind, "*/checkpoints/*000001.json"))
            ref = life.append(b"one")
            assert life.complete_raw(0, None, ref).status_code == 503

            first = life.complete(0, None, ref)

            assert life.restore(first) == (True, [b"one"])
            assert [item["ref"] for item in life.client.get(f"{life.path}/checkpoints").json()] == [first]

    @pytest.mark.parametrize("restart", [False, True])
    def test_lost_response_of_complete_is_success(self, restart: bool) -> None:
        """I5: a driver that got no answer retries and gets the same checkpoint, even from a new process."""
        store = MemoryStore()
        with service(store) as life:
            life.open()
            ref = life.append(b"one")
            first = life.complete(0, None, ref)
            if not restart:
                assert life.complete(0, None, ref) == first
        with service(store) as life:
            life.epoch = 1
            if restart:
                assert life.complete(0, None, ref) == first
            assert life.restore(life.complete(1, first)) == (True, [b"one"])

    def test_older_epoch_is_fenced(self) -> None:
        """I4: after a newer driver took over, every request of the older one is refused."""
        store = MemoryStore()
        with service(store) as old, service(store) as new:
            old.open()
            ref = old.append()
            new.open()
            assert old.complete_raw(0, None, ref).status_code == 409

            old_at_new = Life(new.client)
            old_at_new.epoch = 1
            for answer in (
                old_at_new.append_raw(),
                old_at_new.begin(0),
                old_at_new.abort(0),
                old_at_new.complete_raw(0, None),
            ):
                assert (answer.status_code, kind_of(answer)) == (409, "fenced")

    @pytest.mark.parametrize("case", ["same", "older", "skipped", "none"])
    def test_complete_needs_checkpoint_before(self, case: str) -> None:
        """I4: a checkpoint follows the one directly before it, or a fence at its place would not stop anybody."""
        with service(MemoryStore()) as life:
            life.open()
            first = life.complete(0, None)
            second = life.complete(1, first)
            checkpoint_id, base = {
                "same": (1, second),
                "older": (0, second),
                "skipped": (3, second),
                "none": (2, None),
            }[case]

            answer = life.complete_raw(checkpoint_id, base, uid="new")

            assert (answer.status_code, kind_of(answer)) == (409, "conflict")

    def test_unknown_base_is_not_found(self) -> None:
        """A checkpoint cannot be completed on one that does not exist."""
        with service(MemoryStore()) as life:
            life.open()

            assert life.complete_raw(1, {"id": 0, "generation": 0, "uid": "nobody"}).status_code == 404

    @pytest.mark.parametrize("uid", ["", "a.b", "a/b", "x" * 65, "ü"])
    def test_unreadable_uid_is_refused(self, uid: str) -> None:
        """A uid that cannot be part of a reference would break the chain, so no checkpoint gets it."""
        with service(MemoryStore()) as life:
            life.open()

            assert life.complete_raw(0, None, uid=uid).status_code == 400

    def test_damaged_object_ends_restore_with_error(self) -> None:
        """I10: a restore that reads a damaged object reports it in its stream, with the object's name."""
        store = MemoryStore()
        with service(store) as life:
            life.open()
            ref = life.complete(0, None, life.append(b"one"))
        key = next(info.key for info in store.list("job/segments/"))
        store.put(key, store.get(key)[:-1] + b"?")
        with service(store) as life:
            frames = list(decode_frames(io.BytesIO(life.restore_raw(ref).content)))

            assert [header["kind"] for header, _ in frames] == ["plan", "error", "end"]
            assert frames[1][0]["error"]["kind"] == "corrupt_data"
            assert key in frames[1][0]["error"]["message"]


class TestLimits:
    """I9: bytes in flight."""

    def test_full_service_pushes_back(self) -> None:
        """I9: while the store accepts nothing, a full service answers 429 with a time to wait; later it accepts all."""
        store = FaultyStore(MemoryStore(), Fault("put", FaultKind.FAIL_BEFORE, SEGMENTS, times=None))
        with service(store) as life:
            life.open()
            refs = [life.append(b"x" * 400, sqn=sqn) for sqn in (0, 1)]
            other = Life(life.client, "other")
            other.open()
            other.append(b"x" * 900)
            answer = life.append_raw(b"x" * 400, sqn=2)
            assert (answer.status_code, kind_of(answer), answer.headers["retry-after"]) == (429, "overloaded", "1")

            store.heal()
            life.persist(*refs)
            refs.append(life.append(b"x" * 400, sqn=2))

            assert life.restore(life.complete(0, None, *refs)) == (True, [b"x" * 400] * 3)

    def test_limit_holds_over_all_jobs(self) -> None:
        """I9: the limit applies to the process, not to each job."""
        store = FaultyStore(MemoryStore(), Fault("put", FaultKind.FAIL_BEFORE, SEGMENTS, times=None))
        with service(store) as life:
            for number in range(2):
                other = Life(life.client, f"job{number}")
                other.open()
                other.append(b"x" * 900)

            life.open()
            assert life.append_raw(b"x" * 900).status_code == 429

    def test_known_set_passes_full_service(self) -> None:
        """I8: a set that is already here needs no room, so even a full service answers when it is resent."""
        store = FaultyStore(MemoryStore(), Fault("put", FaultKind.FAIL_BEFORE, SEGMENTS, times=None))
        with service(store) as life:
            life.open()
            ref = life.append(b"x" * 1500)

            assert life.append(b"x" * 1500) == ref

    def test_set_that_never_fits_is_refused(self) -> None:
        """I9: a set larger than the limit is refused for good."""
        with service(MemoryStore()) as life:
            life.open()
            answer = life.append_raw(b"x" * 2001)

            assert (answer.status_code, kind_of(answer)) == (400, "invalid_input")

    def test_endless_body_is_cut_off(self) -> None:
        """I9: a body that passes the limit is refused while it arrives, not after it was collected."""
        with service(MemoryStore()) as life:
            life.open()
            query = (
                b"operator=op&checkpoint_id=0&epoch=1&attempt=1&partition=0&sqn=0&first_key_group=0&last_key_group=1"
                b"&count=1&checksum=0123456789abcdef"
            )
            read, sent = stream_to(life, f"{life.path}/change-sets", query, chunk_bytes=500, chunks=1000)

            assert sent == 400
            assert read <= 6

    def test_sets_of_earlier_checkpoints_are_forgotten(self) -> None:
        """I9: a service that only receives sets, far from the coordinator, keeps none of finished checkpoints."""
        with service(MemoryStore()) as life:
            life.open()
            losers = []
            for checkpoint_id in range(5):
                losers.append(life.append(b"loser", checkpoint_id=checkpoint_id, attempt=1))
                life.persist(life.append(b"winner", checkpoint_id=checkpoint_id, attempt=2))

            assert [life.persist(loser).status_code for loser in losers[:3]] == [410] * 3
            assert samples(life)["dstl_in_flight_bytes"] <= 2 * len(b"loser")


def stream_to(life: Life, path: str, query: bytes, chunk_bytes: int, chunks: int) -> tuple[int, int]:
    """Send a body in chunks directly to the application; return the number of chunks read and the answer's status."""
    read = 0
    status = 0

    async def receive() -> Message:
        nonlocal read
        read += 1
        return {"type": "http.request", "body": b"x" * chunk_bytes, "more_body": read < chunks}

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)

    life.post_raw(path, query, [], receive, send)
    return read, status


class TestRequests:
    """Invalid requests, and requests without access."""

    @pytest.mark.parametrize("kind", list(ErrorKind))
    def test_every_error_has_status(self, kind: ErrorKind) -> None:
        """Every kind of error has an HTTP status."""
        assert 400 <= HTTP_STATUS[kind] < 600

    def test_unexpected_store_error_has_its_kind(self) -> None:
        """An error of the store keeps its kind on its way to the client."""
        fault = Fault("list", FaultKind.FAIL_BEFORE, error=lambda: UnavailableError("away", key="k"))
        with service(FaultyStore(MemoryStore(), fault)) as life:
            answer = life.client.post(f"{life.path}/epochs", json={"owner": "test"})

            assert (answer.status_code, answer.json()) == (
                503,
                {"kind": "unavailable", "message": "away", "context": {"key": "k"}},
            )

    def test_damaged_body_is_refused(self) -> None:
        """I10: bytes that changed in transit are refused."""
        with service(MemoryStore()) as life:
            life.open()
            answer = life.append_raw(b"payload", checksum="0" * 16)

            assert (answer.status_code, kind_of(answer)) == (422, "corrupt_data")
            assert life.append(b"payload")

    def test_other_content_is_conflict(self) -> None:
        """I8: the same identity with other bytes is answered with 409."""
        with service(MemoryStore()) as life:
            life.open()
            life.append(b"one")
            answer = life.append_raw(b"two")

            assert (answer.status_code, kind_of(answer)) == (409, "conflict")

    @pytest.mark.parametrize(
        "changes",
        [
            {"operator": "a/b"},
            {"operator": "..."},
            {"operator": ""},
            {"checkpoint_id": -1},
            {"checkpoint_id": "x"},
            {"checkpoint_id": 1 << 60},
            {"epoch": 1 << 64},
            {"partition": 32_768},
            {"first_key_group": 5, "last_key_group": 4},
            {"last_key_group": 32_768},
            {"count": 1 << 40},
            {"checksum": "xyz"},
            {"checksum": "0" * 17},
        ],
    )
    def test_impossible_set_is_refused(self, changes: dict[str, Any]) -> None:
        """A set that an object's index cannot describe is refused as invalid, and nothing of it is kept."""
        with service(MemoryStore()) as life:
            life.open()
            answer = life.append_raw(**changes)

            assert (answer.status_code, kind_of(answer)) == (400, "invalid_input")
            assert samples(life)["dstl_in_flight_bytes"] == 0

    @pytest.mark.parametrize(
        ("job", "refused"),
        [
            ("a%2Fb", (404, "not_found")),  # the path then has another part, and no route
            (".hidden", (400, "invalid_input")),
            ("%2E%2E", (400, "invalid_input")),
            ("a b", (400, "invalid_input")),
            ("x" * 129, (400, "invalid_input")),
            ("ü", (400, "invalid_input")),
        ],
    )
    @pytest.mark.parametrize("path", ["epochs", "persist", "checkpoints/0/begin"])
    def test_impossible_job_name_is_refused(self, job: str, refused: tuple[int, str], path: str) -> None:
        """A name that could leave the job's folder reaches no store."""
        store = RecordingStore(MemoryStore())
        with service(store) as life:
            answer = life.client.post(f"/v1/jobs/{job}/{path}", json={"owner": "x", "epoch": 1, "refs": []})

            assert (answer.status_code, kind_of(answer)) == refused
            assert not [call for call in store.calls if call.key]

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("persist", b"{"),
            ("persist", b"[]"),
            ("persist", b'{"epoch":1,"refs":[{}]}'),
            ("persist", b'{"epoch":"x","refs":[]}'),
            ("checkpoints/0/complete", b'{"epoch":1}'),
            ("checkpoints/-1/begin", b'{"epoch":1}'),
            ("epochs", b""),
        ],
    )
    def test_unreadable_document_is_refused(self, path: str, body: bytes) -> None:
        """A malformed document is answered with 400 and the project's own error."""
        with service(MemoryStore()) as life:
            life.open()
            answer = life.client.post(f"{life.path}/{path}", content=body, headers={"content-type": "application/json"})

            assert (answer.status_code, kind_of(answer)) == (400, "invalid_input")

    @pytest.mark.parametrize("handle", [{}, {"object": "../../etc/passwd"}, {"object": 3}])
    def test_strange_handle_is_refused(self, handle: dict[str, Any]) -> None:
        """A malformed handle is an invalid request."""
        with service(MemoryStore()) as life:
            life.open()

            assert life.persist({**life.append(), "handle": handle}).status_code == 400

    def test_unknown_job_is_not_found(self) -> None:
        """A request for a job that nobody opened gets 404, and creates no job."""
        store = MemoryStore()
        with service(store) as life:
            ref = {"id": 0, "generation": 0, "uid": "u"}
            for answer in (life.begin(0), life.complete_raw(0, None), life.restore_raw(ref)):
                assert (answer.status_code, kind_of(answer)) == (404, "not_found")

        with pytest.raises(NotFoundError):
            store.head("job/job.json")

    @pytest.mark.parametrize(
        "changes", [{"to": "1"}, {"to": "1.2.3.4"}, {"have": "x"}, {"first_key_group": 9, "last_key_group": 1}]
    )
    def test_impossible_restore_is_refused(self, changes: dict[str, Any]) -> None:
        """A restore with impossible names is an invalid request."""
        with service(MemoryStore()) as life:
            life.open()
            ref = life.complete(0, None)

            assert life.restore_raw(ref, **changes).status_code == 400

    def test_token_is_needed_everywhere(self, tmp_path: Path) -> None:
        """Without the token only the service's health can be read."""
        path = tmp_path / "token"
        path.write_text("secret", encoding="utf-8")
        refused: list[Mapping[bytes, bytes]] = [
            {},
            {b"authorization": b"Bearer other"},
            {b"authorization": b"secret"},
            {b"authorization": "Bearer \xfc".encode("latin-1")},
        ]
        with service(MemoryStore(), token_file=path) as life:
            for headers in refused:
                assert life.client.get("/v1/info", headers=headers).status_code == 401
            assert life.client.get("/openapi.json").status_code == 401
            assert life.client.get("/health").status_code == 200

            life.client.headers["authorization"] = "Bearer secret"
            assert life.client.get("/v1/info").status_code == 200

    def test_ready_means_writable(self) -> None:
        """A service whose storage cannot be written is alive and not ready."""
        fault = Fault("check_writable", FaultKind.FAIL_BEFORE)
        with service(FaultyStore(MemoryStore(), fault)) as life:
            assert life.client.get("/health").status_code == 200
            assert life.client.get("/ready").status_code == 503
            assert life.client.get("/ready").json() == {"status": "ready"}

    def test_info_names_process(self) -> None:
        """Each start of the service has an id of its own."""
        with service(MemoryStore()) as one, service(MemoryStore()) as two:
            one.open()
            infos = [life.client.get("/v1/info").json() for life in (one, two)]

            assert infos[0]["service_id"] != infos[1]["service_id"]
            assert [item["jobs"] for item in infos] == [["job"], []]

    def test_openapi_document_is_served(self) -> None:
        """The OpenAPI document describes every route."""
        with service(MemoryStore()) as life:
            paths = life.client.get("/openapi.json").json()["paths"]

            assert {"/v1/jobs/{job}/change-sets", "/v1/jobs/{job}/restore", "/v1/jobs/{job}/epochs"} <= paths.keys()

    def test_settings_are_checked_before_start(self, tmp_path: Path) -> None:
        """A missing token file stops the application before it listens."""
        with pytest.raises(ValueError, match="token file"), service(MemoryStore(), token_file=tmp_path / "none"):
            pass
