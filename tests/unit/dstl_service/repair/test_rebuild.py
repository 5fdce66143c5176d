"""A lost registry is rebuilt from segment objects alone: with what checkpoints accepted, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dstl_service.checkpoints.rewind import rewind
from dstl_service.cli import main
from dstl_service.collection.job_deletion import delete_job
from dstl_service.collection.retention import retained_manifests
from dstl_service.formats.checkpoint_record import NotedSet
from dstl_service.formats.checksummed_json import seal
from dstl_service.formats.keys import JobRecord, decode_job, encode_job, manifest_key
from dstl_service.formats.manifest import ManifestKind, StateView
from dstl_service.formats.materialization_index import MaterializationIndex
from dstl_service.registry.hints import write_hint
from dstl_service.registry.job_store import JobStore
from dstl_service.registry.manifest_log import place_of_manifest
from dstl_service.repair.fsck import check_job
from dstl_service.repair.manifests import manifests_of
from dstl_service.repair.plan import CheckpointCandidate, choose
from dstl_service.repair.rebuild import RebuildReport, describe_rebuild, rebuild_registry
from dstl_service.repair.scan import Registry
from dstl_service.restore.plan import plan_restore, read_handles
from dstl_service.restore.segment_cache import SegmentCache
from dstl_service.wire import BRANCH_GENERATIONS, NOTE_OPERATOR, CheckpointRef
from storage.checksum import checksum64
from storage.clock import SystemClock, SystemIds
from storage.errors import CorruptDataError, InvalidInputError, NewerFormatError, NotFoundError, UnavailableError
from storage.key_groups import KeyGroupRange
from storage.memory_store import MemoryStore
from storage.model import MaterializationHandle
from storage.object_store import ObjectStore
from storage.open import open_store
from storage.testing import FakeClock, FakeIds, Fault, FaultKind, FaultyStore, Operation
from tests.unit.dstl_service.collection.test_job_maintenance import EAGER, NOW, MaintainedJob
from tests.unit.dstl_service.http_life import Life, service
from tests.unit.dstl_service.job_history import JobHistory
from tests.unit.dstl_service.samples import handles_of, opened, segment, stored
from tests.unit.dstl_service.snapshots import index_of, store_snapshot

OPERATORS = ("counts", "joins")
OPERATOR_INFOS = [{"name": name, "parallelism": 2, "key_schema": "{}", "states": {}} for name in OPERATORS]
ALL_GROUPS = KeyGroupRange(0, 127)
LAST = 27

Content = dict[str, list[bytes]]


@dataclass
class Story:
    """
    A job whose history leaves unaccepted sets and notes.

    Two operators; losing attempts that were stored; completions that were given up after their upload; a driver fenced
    during a checkpoint; a changed parallelism from then on; an empty batch.
    """

    store: ObjectStore
    refs: list[dict[str, Any]] = field(default_factory=list)
    contents: list[Content] = field(default_factory=list)
    attempt: int = 0

    def tell(self) -> Story:
        """Run it: checkpoints 0-5 by the first driver, up to `LAST` by the second."""
        with service(self.store) as old:
            old.open()
            for checkpoint_id in range(6):
                self.checkpoint(old, checkpoint_id, parallelism=2)
            late = self.request(6, self.sets(old, 6, 2, b"fenced")[0])
            assert self.flush(old, 6, late).status_code == 204
            with service(self.store) as new:
                new.open()
                assert old.complete_raw(6, late.pop("base"), *late.pop("refs"), **late).status_code == 409
                for checkpoint_id in range(6, LAST + 1):
                    self.checkpoint(new, checkpoint_id, parallelism=3)
        return self

    def checkpoint(self, life: Life, checkpoint_id: int, parallelism: int) -> None:
        """Complete a checkpoint after one attempt to complete it that is given up."""
        life.begin(checkpoint_id)
        if checkpoint_id % 3 == 1:
            refs, _ = self.sets(life, checkpoint_id, parallelism, b"given up")
            assert self.flush(life, checkpoint_id, self.request(checkpoint_id, refs)).status_code == 204
            life.persist(*refs)
            life.abort(checkpoint_id)
            life.begin(checkpoint_id)
        refs, content = self.sets(life, checkpoint_id, 0 if checkpoint_id == 9 else parallelism, b"accepted")
        request = self.request(checkpoint_id, refs)
        if checkpoint_id % 2:
            assert self.flush(life, checkpoint_id, request).status_code == 204
        base = self.refs[-1] if self.refs else None
        self.refs.append(life.complete(checkpoint_id, base, *refs, uid=request["uid"], operators=OPERATOR_INFOS))
        before = self.contents[-1] if self.contents else {name: [] for name in OPERATORS}
        self.contents.append({name: before[name] + content[name] for name in OPERATORS})

    def sets(
        self, life: Life, checkpoint_id: int, parallelism: int, what: bytes
    ) -> tuple[list[dict[str, Any]], Content]:
        """Send each partition's sets, those of a losing attempt too; return the sets to accept."""
        refs, content = [], {name: list[bytes]() for name in OPERATORS}
        for name in OPERATORS:
            for partition in range(parallelism):
                self.attempt += 2
                groups = {
                    "first_key_group": partition * 128 // parallelism,
                    "last_key_group": (partition + 1) * 128 // parallelism - 1,
                }
                ids = {"operator": name, "checkpoint_id": checkpoint_id, "partition": partition, **groups}
                loser = life.append(b"loser", attempt=self.attempt, preemptive="true", **ids)
                if checkpoint_id % 4 == 2:
                    life.persist(loser)
                for sqn in range(2):
                    payload = f"{what.decode()} {name} {checkpoint_id}/{partition}/{sqn}".encode()
                    refs.append(life.append(payload, attempt=self.attempt + 1, sqn=sqn, **ids))
                    content[name].append(payload)
        return refs, content

    def request(self, checkpoint_id: int, refs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the request of a completion."""
        self.attempt += 1
        base = self.refs[-1] if self.refs else None
        return {"uid": f"try{self.attempt}", "base": base, "refs": refs, "operators": OPERATOR_INFOS}

    def flush(self, life: Life, checkpoint_id: int, request: dict[str, Any]) -> Any:
        """Start the upload of a completion, and wait until it is stored."""
        body = {"epoch": life.epoch, "query_id": "query", "offsets": "offsets", **request}
        answer = life.client.post(f"{life.path}/checkpoints/{checkpoint_id}/flush", json=body)
        life.persist(*request["refs"])
        return answer

    def restored(self, ref: dict[str, Any] | str) -> Content:
        """Return what a table gets at a checkpoint, read by a new process."""
        jobs = JobStore(self.store, "job", FakeClock(), FakeIds(9))
        jobs.open(None)
        named = {manifest.ref.to_text(): manifest.ref for manifest in jobs.completed()}
        want = named[ref] if isinstance(ref, str) else next(r for r in named.values() if r.uid == ref["uid"])
        return {
            name: [
                bytes(payload)
                for _, payload in read_handles(
                    plan_restore(jobs, name, ALL_GROUPS, None, want).handles, self.store, SegmentCache(0)
                )
            ]
            for name in OPERATORS
        }

    def keys(self, folder: str) -> list[str]:
        """Return the keys of a folder of the job."""
        return [info.key for info in self.store.list(f"job/{folder}")]

    def lose(self, *folders: str) -> None:
        """Delete parts of the registry."""
        for folder in folders:
            self.store.delete(self.keys(folder))

    def rebuild(self, *, write: bool = True, up_to: int | None = None) -> RebuildReport:
        """Rebuild the registry."""
        return rebuild_registry(self.store, "job", SystemClock(), SystemIds(), write=write, up_to=up_to)

    def object_of(self, checkpoint_id: int, sqn: int = 0) -> str:
        """Return the object that holds a set of a checkpoint."""
        jobs = JobStore(self.store, "job", FakeClock(), FakeIds(9))
        ref = self.refs[checkpoint_id]
        return jobs.load(checkpoint_id, ref["generation"]).segments[sqn].object_key


Told = tuple[dict[str, bytes], list[dict[str, Any]], list[Content]]


def tell() -> Told:
    """Return a story's objects, checkpoints and expected content."""
    story = Story(MemoryStore()).tell()
    return {info.key: story.store.get(info.key) for info in story.store.list("")}, story.refs, story.contents


def again(told: Told) -> Story:
    """Return a story in a store of its own."""
    objects, refs, contents = told
    store = MemoryStore()
    for key, data in objects.items():
        store.put(key, data)
    return Story(store, list(refs), list(contents))


@pytest.fixture(scope="module")
def told() -> Told:
    """The story, told once."""
    return tell()


@pytest.fixture
def story(told: Told) -> Story:
    """Return a story."""
    return again(told)


def test_story_is_sound(story: Story) -> None:
    """Before any loss, each checkpoint restores to its accepted sets, and a rebuild is refused."""
    assert check_job(story.store, "job").problems == []
    assert [story.restored(ref) for ref in story.refs] == story.contents
    assert story.rebuild(write=False).registry_problems == []
    before = story.keys("")
    with pytest.raises(InvalidInputError, match="sound"):
        story.rebuild()
    assert story.keys("") == before


def test_lost_registry_is_rebuilt(story: Story) -> None:
    """I10: without job.json, epochs and manifests, every checkpoint of the newest chain is rebuilt unchanged."""
    uid = json.loads(story.store.get("job/job.json"))["uid"]
    story.lose("job.json", "epochs/", "checkpoints/")
    report = story.rebuild()

    assert (report.is_written, report.is_proven, report.lost, report.object_problems) == (True, False, [], [])
    assert decode_job(story.store.get("job/job.json"), "") == JobRecord(uid, 128)
    jobs = JobStore(story.store, "job", FakeClock(), FakeIds(9))
    rebuilt = list(jobs.completed())
    assert [manifest.id for manifest in rebuilt] == list(range(20, LAST + 1))
    for manifest in rebuilt:
        assert manifest.ref.to_text() == "{id}.{generation}.{uid}".format(**story.refs[manifest.id])
        assert story.restored(manifest.ref.to_text()) == story.contents[manifest.id]
        assert (manifest.query_id, manifest.offsets) == ("query", "offsets")
        assert [operator.name for operator in manifest.operators] == list(OPERATORS)
    assert check_job(story.store, "job").problems == []


def test_job_goes_on_after_rebuild(story: Story) -> None:
    """I4: a rebuilt job can be taken over and continued; a driver from before the loss is fenced."""
    with service(story.store) as before:
        before.open()
        story.lose("job.json", "epochs/", "checkpoints/")
        report = story.rebuild()
        with service(story.store) as after:
            assert after.open()["latest"]["ref"]["uid"] == story.refs[-1]["uid"]
            assert after.epoch > report.epoch > before.epoch
            story.checkpoint(after, LAST + 1, parallelism=1)
            assert before.complete_raw(LAST + 1, story.refs[LAST], uid="late").status_code == 409

    assert story.restored(story.refs[-1]) == story.contents[-1]
    assert check_job(story.store, "job").problems == []


def test_hints_of_the_old_history_are_forgotten(story: Story) -> None:
    """I12: a hint that is newer than the rebuilt checkpoint hides nothing from the collector or an owner."""
    write_hint(story.store, "job", "swept", 0, 10_000, 0, checksum64(opened(story.store).job_uid.encode()))
    write_hint(story.store, "job", "epoch", 10_000)
    story.lose("job.json", "epochs/", "checkpoints/")
    rebuilt = story.rebuild().checkpoint
    with service(story.store) as life:
        life.open()
        story.refs[-1] = asdict(CheckpointRef.parse(rebuilt))
        for checkpoint_id in (LAST + 1, LAST + 2):
            story.checkpoint(life, checkpoint_id, parallelism=2)
    jobs = opened(story.store)
    newest = jobs.newest()
    assert newest is not None

    found = [ref.to_text() for ref, _ in jobs.subsumed([newest.ref])]
    assert found[-2:] == [rebuilt, CheckpointRef(**story.refs[-2]).to_text()]


def test_rebuild_after_rebuild(story: Story) -> None:
    """A registry that is lost again after a rebuild and further checkpoints is rebuilt again."""
    for _ in range(2):
        story.lose("job.json", "epochs/", "checkpoints/")
        story.rebuild()
        with service(story.store) as life:
            life.open()
            for checkpoint_id in range(len(story.refs), len(story.refs) + 3):
                story.checkpoint(life, checkpoint_id, parallelism=2)
    story.lose("job.json", "epochs/", "checkpoints/")

    assert story.restored(story.rebuild().checkpoint) == story.contents[-1]


def test_dry_run_writes_nothing(story: Story) -> None:
    """Without the option to write, a rebuild only reports what it would do."""
    story.lose("job.json", "epochs/", "checkpoints/")
    before = story.keys("")
    report = story.rebuild(write=False)

    assert story.keys("") == before
    assert (report.is_written, len(report.manifests)) == (False, LAST - 19)
    assert story.rebuild().manifests == report.manifests


@pytest.mark.parametrize("cut", range(4))
def test_rebuild_is_repeated_after_crash(story: Story, cut: int) -> None:
    """A rebuild that died between two writes is repeated, and has the same result."""
    story.lose("job.json", "epochs/", "checkpoints/")
    expected = story.rebuild().checkpoint
    story.lose("job.json", "epochs/")
    story.store.delete(story.keys("checkpoints/")[cut:])

    assert story.rebuild().checkpoint == expected
    assert story.restored(expected) == story.contents[-1]


def after_deaths(story: Story, operation: Operation, kind: FaultKind) -> Iterator[tuple[int, Story]]:
    """Yield the number of each call at which a rebuild can die, and the job after another rebuild."""
    before = {key: story.store.get(key) for key in story.keys("")}
    for number in range(100):
        store = MemoryStore()
        for key, data in before.items():
            store.put(key, data)
        dying = FaultyStore(store, Fault(operation, kind, skip=number))
        again = Story(store, story.refs, story.contents)
        try:
            rebuild_registry(dying, "job", SystemClock(), SystemIds(), write=True)
        except UnavailableError:
            with suppress(InvalidInputError):  # nothing was left to do
                again.rebuild()
        else:
            break
        yield number, again
    assert 0 < number < 99


@pytest.mark.parametrize("operation", ["put", "delete"])
@pytest.mark.parametrize("is_damaged", [False, True])
@pytest.mark.parametrize("kind", [FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER])
def test_rebuild_that_died_anywhere_forgets_no_checkpoint(
    story: Story, operation: Operation, *, is_damaged: bool, kind: FaultKind
) -> None:
    """I10: wherever a rebuild dies, the newest checkpoint, which only its note proves, is there or is found again."""
    last = story.keys("checkpoints/")[-1 if is_damaged else -3 :]
    for key in last:
        data = story.store.get(key)
        story.store.delete([key])
        if is_damaged:
            story.store.put(key, data[:-1])
    for written, again in after_deaths(story, operation, kind):
        newest = opened(again.store).newest()
        assert newest is not None
        assert newest.uid == story.refs[-1]["uid"], f"died at {operation} {written}"
        assert again.restored(newest.ref.to_text()) == story.contents[-1]
        assert check_job(again.store, "job").problems == []


def test_only_checkpoint_without_epochs_and_manifests_is_no_sound_registry() -> None:
    """I10: epochs and manifests are lost, and the only checkpoint's note is of a lost epoch: it is found again."""
    story = Story(MemoryStore())
    with service(story.store) as life:
        life.open()
        story.checkpoint(life, 0, parallelism=2)
    story.lose("epochs/", "checkpoints/")

    report = story.rebuild()

    assert report.registry_problems == ["job/epochs/00000000000000000001.json is missing: a note is of this epoch"]
    assert not report.is_proven
    assert story.restored(report.checkpoint) == story.contents[0]
    assert report.epoch > 1
    assert check_job(story.store, "job").problems == []


def test_newest_checkpoint_without_its_manifest_comes_back_if_it_is_named() -> None:
    """I10: only Spark's commit tells that it was completed, so a rebuild takes the user's word, and no other."""
    story = Story(MemoryStore())
    with service(story.store) as life:
        life.open()
        for checkpoint_id in range(3):
            story.checkpoint(life, checkpoint_id, parallelism=2)
    story.store.delete([story.keys("checkpoints/")[-1]])
    for up_to in (None, 1, 3):
        with pytest.raises(InvalidInputError, match="sound"):
            story.rebuild(up_to=up_to)
    dry = rebuild_registry(story.store, "job", SystemClock(), SystemIds())
    assert "if it exists, say so with --up-to 2" in "\n".join(describe_rebuild(dry))

    report = story.rebuild(up_to=2)

    assert story.restored(report.checkpoint) == story.contents[2]
    assert check_job(story.store, "job").problems == []


def test_checkpoint_is_rebuilt_behind_the_fences_of_its_id() -> None:
    """I4: in front of a fence that is left, it would leave the next id to drivers from before a takeover."""
    story = Story(MemoryStore())
    with service(story.store) as life:
        life.open()
        story.checkpoint(life, 0, parallelism=2)
        for _ in range(3):
            life.open()
        story.checkpoint(life, 1, parallelism=2)
    *_, first_fence, second_fence, _, newest = story.keys("checkpoints/")
    story.store.delete([first_fence, newest])
    story.lose("epochs/")

    report = story.rebuild()

    assert story.restored(report.checkpoint) == story.contents[1]
    assert manifest_key("job", 1, CheckpointRef.parse(report.checkpoint).generation) > second_fence
    with service(story.store) as older, service(story.store) as newer:
        story.refs[1] = older.open()["latest"]["ref"]
        newer.open()
        refused = older.complete_raw(2, story.refs[1], older.append(checkpoint_id=2))
        assert (refused.status_code, refused.json()["kind"]) == (409, "fenced")


def test_newest_can_be_left_out(story: Story) -> None:
    """A checkpoint that nothing proves to be completed can be left out; the one before it is proven."""
    story.lose("job.json", "epochs/", "checkpoints/")
    report = story.rebuild(up_to=LAST - 1)

    assert report.is_proven
    assert story.restored(report.checkpoint) == story.contents[LAST - 1]


@pytest.mark.parametrize("lost", range(21, LAST + 1))
@pytest.mark.parametrize("damage", ["missing", "flipped", "cut"])
def test_newest_whole_checkpoint_is_chosen(story: Story, lost: int, damage: str) -> None:
    """I10: if an object is damaged or missing, the newest checkpoint without it is rebuilt; the report says so."""
    key = story.object_of(lost)
    data = bytearray(story.store.get(key))
    data[20] ^= 1
    story.store.delete([key])
    if damage != "missing":
        story.store.put(key, bytes(data) if damage == "flipped" else bytes(data[:-1]))
    story.lose("job.json", "epochs/", "checkpoints/")
    report = story.rebuild()

    assert report.checkpoint.startswith(f"{lost - 1}.")
    assert story.restored(report.checkpoint) == story.contents[lost - 1]
    assert len(report.lost) >= LAST - lost
    assert damage == "missing" or key in " ".join(report.object_problems)
    assert check_job(story.store, "job").problems == []


WITH_SINK = [
    *OPERATOR_INFOS,
    {"name": "output", "parallelism": 1, "key_schema": "", "states": {}, "kind": "sink"},
]


@pytest.fixture(scope="module")
def told_with_sink() -> Told:
    """The story of a job with a sink, told once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.OPERATOR_INFOS", WITH_SINK)
        return tell()


@pytest.fixture
def with_sink(monkeypatch: pytest.MonkeyPatch, told_with_sink: Told) -> Story:
    """Return the story of a job with a sink."""
    monkeypatch.setattr(f"{__name__}.OPERATOR_INFOS", WITH_SINK)
    return again(told_with_sink)


@pytest.fixture
def published(with_sink: Story) -> Story:
    """Return the same after the loss of the registry and of the newest checkpoint."""
    with_sink.store.delete([with_sink.object_of(LAST)])
    with_sink.lose("job.json", "epochs/", "checkpoints/")
    del with_sink.refs[LAST:], with_sink.contents[LAST:]
    return with_sink


def test_ids_of_lost_checkpoints_come_again_on_another_branch(published: Story) -> None:
    """I3: a sink takes no output under the id of a lost checkpoint for the output that it published under that id."""
    report = published.rebuild()

    assert (report.sinks, report.branch > 2) == (["output"], True)
    assert published.restored(report.checkpoint) == published.contents[-1]
    for line in ("sets its Spark checkpoint back", "is published again: output"):
        assert line in "\n".join(describe_rebuild(report))
    newest = opened(published.store).newest()
    assert newest is not None
    assert (newest.id, place_of_manifest(newest).branch) == (LAST - 1, report.branch)
    assert newest.rewound_from is not None
    with service(published.store) as life:
        published.refs[-1] = life.open()["latest"]["ref"]
        published.checkpoint(life, LAST, parallelism=1)
    published.lose("job.json", "epochs/", "checkpoints/")
    again = published.rebuild()
    assert published.restored(again.checkpoint) == published.contents[-1]
    assert CheckpointRef.parse(again.checkpoint).branch >= report.branch
    assert check_job(published.store, "job").problems == []


def test_checkpoint_of_which_nothing_is_left_may_have_been_published(with_sink: Story) -> None:
    """I3: its manifest and object are lost, the one before is sound: its id comes again on another branch."""
    with_sink.store.delete([with_sink.object_of(LAST), with_sink.keys("checkpoints/")[-1]])
    with_sink.lose("job.json")
    del with_sink.refs[LAST:], with_sink.contents[LAST:]

    report = with_sink.rebuild()

    assert (report.sinks, report.lost) == (["output"], [])
    assert CheckpointRef.parse(report.checkpoint).branch == report.branch > 2
    assert with_sink.restored(report.checkpoint) == with_sink.contents[-1]
    assert check_job(with_sink.store, "job").problems == []


@pytest.mark.parametrize("dies", [False, True])
def test_driver_from_before_a_rebuilds_branch_is_fenced(with_sink: Story, *, dies: bool) -> None:
    """I4: a rebuild that begins a branch ends the one before, even if it dies after the new one's first manifest."""
    with service(with_sink.store) as before:
        before.open()
        with_sink.lose("job.json", "epochs/", "checkpoints/")
        if dies:
            dying = FaultyStore(with_sink.store, Fault("put", FaultKind.FAIL_AFTER, skip=1))
            with pytest.raises(UnavailableError):
                rebuild_registry(dying, "job", SystemClock(), SystemIds(), write=True)
        assert CheckpointRef.parse(with_sink.rebuild().checkpoint).branch > before.epoch - 1
        late = before.complete_raw(LAST + 1, with_sink.refs[-1], uid="late", operators=OPERATOR_INFOS)

    assert late.status_code == 409
    assert check_job(with_sink.store, "job").problems == []


@pytest.mark.parametrize("kind", [FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER])
def test_rebuild_that_died_anywhere_begins_its_branch(published: Story, kind: FaultKind) -> None:
    """I3: wherever a rebuild that begins a branch dies, it is repeated until the job goes on there."""
    for written, again in after_deaths(published, "put", kind):
        newest = opened(again.store).newest()
        assert newest is not None
        assert place_of_manifest(newest).branch > 2, f"died at put {written}"
        assert again.restored(newest.ref.to_text()) == published.contents[-1]
        assert check_job(again.store, "job").problems == []


def test_loss_of_log_start_is_fatal(story: Story) -> None:
    """I10: if no checkpoint is whole, nothing is written, and the error names the missing objects."""
    story.store.delete([story.object_of(0)])
    story.lose("job.json", "epochs/", "checkpoints/")
    before = story.keys("")

    with pytest.raises(CorruptDataError, match=r"no checkpoint .* can be restored: .*checkpoint 0, attempt"):
        story.rebuild()
    assert story.keys("") == before


@pytest.mark.parametrize("checkpoint_id", [20, 22, LAST])
def test_damaged_manifest_is_replaced(story: Story, checkpoint_id: int) -> None:
    """A damaged manifest is moved away and rebuilt from its note; sound objects are not touched."""
    ref = story.refs[checkpoint_id]
    key = f"job/checkpoints/{checkpoint_id:020d}.{ref['generation']:06d}.json"
    data = story.store.get(key)
    story.store.put(key, data[:-1])
    sound = {name: story.store.get(name) for name in story.keys("") if name != key and "/hints/" not in name}
    report = story.rebuild()

    assert report.moved == [key]
    assert story.restored(report.checkpoint) == story.contents[LAST]
    assert {name: story.store.get(name) for name in sound} == sound
    assert [story.store.get(name) for name in story.keys("damaged/")] == [data[:-1]]
    assert check_job(story.store, "job").problems == []


@pytest.mark.parametrize("name", ["job.json", "epochs/00000000000000000002.json"])
def test_damaged_record_is_replaced(story: Story, name: str) -> None:
    """A damaged job.json or epoch record is moved away and created again; no manifest is written."""
    story.store.put(f"job/{name}", b"{")
    report = story.rebuild()

    assert (report.moved, report.manifests) == ([f"job/{name}"], [])
    assert report.checkpoint.startswith(f"{LAST}.")
    assert report.is_proven
    assert check_job(story.store, "job").problems == []
    with service(story.store) as life:
        assert life.open()["epoch"] > 3


def test_missing_newest_manifests_are_noticed(story: Story) -> None:
    """A registry without its last manifests does not pass for a sound, older one: notes prove that they existed."""
    story.lose(*(f"checkpoints/{checkpoint_id:020d}" for checkpoint_id in range(LAST - 2, LAST + 1)))
    report = story.rebuild()

    assert report.registry_problems == [f"manifests up to checkpoint {LAST - 1} are missing"]
    assert story.restored(report.checkpoint) == story.contents[LAST]


def test_sound_newer_manifest_is_never_overruled(story: Story) -> None:
    """A rebuild does not return to a checkpoint before one with a sound manifest, even if its objects are lost."""
    story.store.delete([story.object_of(LAST)])
    story.lose("job.json")
    before = story.keys("")

    with pytest.raises(InvalidInputError, match=f"{LAST:020d}.* is sound"):
        story.rebuild()
    assert story.keys("") == before


@pytest.mark.parametrize("name", ["job.json", "checkpoint", "savepoint", "note"])
def test_newer_format_is_left_alone(story: Story, name: str) -> None:
    """An object of a newer version is not damaged: a program that cannot read it says so, and rebuilds nothing."""
    newer = seal("manifest", {"format": 99})
    key = {
        "job.json": "job/job.json",
        "checkpoint": story.keys("checkpoints/")[-1],
        "savepoint": "job/savepoints/kept.json",
        "note": "job/segments/host/zz.seg",
    }[name]
    if name == "note":
        stored(story.store, [segment(payload=b'{"format":99}', operator=NOTE_OPERATOR)], key)
        newer = story.store.get(key)
    story.store.put(key, b'{"format":99,"uid":"u","max_parallelism":128}' if name == "job.json" else newer)
    story.lose("epochs/")
    before = story.keys("")

    with pytest.raises(NewerFormatError, match=f"{key} was written by a newer version"):
        story.rebuild()
    assert story.keys("") == before
    if name != "note":
        with pytest.raises(NewerFormatError):
            check_job(story.store, "job")


def test_other_life_of_job_is_ignored(story: Story) -> None:
    """Objects of an earlier job of the same name, beside which another was put, are not mixed with its own."""
    story.lose("job.json", "epochs/", "checkpoints/")
    story.store.put("job/job.json", encode_job("f" * 32, 128))
    later = Story(story.store)
    with service(story.store) as life:
        life.open()
        for checkpoint_id in range(3):
            later.checkpoint(life, checkpoint_id, parallelism=2)
    later.lose("epochs/", "checkpoints/")
    report = later.rebuild()

    assert report.checkpoint.startswith("2.")
    assert later.restored(report.checkpoint) == later.contents[2]


def test_unknown_job_is_not_found() -> None:
    """A job without any object cannot be rebuilt."""
    with pytest.raises(NotFoundError):
        Story(MemoryStore()).rebuild()


def test_fenced_note_is_not_taken(story: Story) -> None:
    """I4: a completion by an overtaken driver never wins, even if all checkpoints of the newer driver are lost."""
    keys = {story.object_of(checkpoint_id) for checkpoint_id in range(6, LAST + 1) if checkpoint_id != 9}
    story.store.delete(keys)
    story.lose("job.json", "epochs/")
    story.store.delete([key for key in story.keys("checkpoints/") if not key.endswith(f"{6:020d}.000000.json")])
    report = story.rebuild()

    assert report.checkpoint.startswith("5.")
    assert story.restored(report.checkpoint) == story.contents[5]


def told_in(folder: Path, told: Told, lose: Callable[[str], bool]) -> str:
    """Write a story's objects into a folder, without some of them; return the folder's URL."""
    store = open_store(f"file://{folder}")
    for key, data in told[0].items():
        if not lose(key):
            store.put(key, data)
    return store.url


def test_command_rebuilds(told: Told, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`dstl fsck --rebuild` reports what it would do and exits with 1; with --write it does it, and fsck succeeds."""
    url = told_in(tmp_path, told, lambda key: "/segments/" not in key)
    command = ["fsck", "--storage", url, "job"]
    assert main(command) == 1
    capsys.readouterr()
    assert main([*command, "--rebuild"]) == 1
    out = capsys.readouterr().out
    assert "nothing was written; pass --write to do it" in out
    assert f"exclude it with --up-to {LAST - 1}" in out

    assert main([*command, "--rebuild", "--write", "--up-to", str(LAST - 1), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["is_written"], report["is_proven"]) == (True, True)
    assert main(command) == 0
    assert main([*command, "--rebuild", "--write"]) == 2


def test_note_of_complete_manifest_needs_no_older_one(story: Story) -> None:
    """The note of a complete manifest names all earlier sets, so older notes may be gone."""
    (empty,) = [m.note for m in opened(story.store).completed() if m.note is not None]
    assert empty.entry.id.checkpoint_id == 9
    story.store.delete([empty.object_key])
    story.lose("job.json", "epochs/", "checkpoints/")
    before = story.rebuild(write=False, up_to=19)
    assert before.checkpoint.startswith("8.")
    assert "manifest of checkpoint 9." in before.lost[0]

    assert story.restored(story.rebuild().checkpoint) == story.contents[LAST]


def rewound_story(then: str) -> Story:
    """Return the story of a job that was rewound from 5 to 2, and `then` did nothing, continued or was set forward."""
    story = Story(MemoryStore())

    def go_on(checkpoints: int) -> None:
        with service(story.store) as life:
            latest = life.open()["latest"]
            begin = latest["ref"]["id"] + 1 if latest else 0
            story.refs, story.contents = story.refs[:begin], story.contents[:begin]
            story.refs[begin - 1 : begin] = [latest["ref"]] if latest else []
            for checkpoint_id in range(begin, begin + checkpoints):
                story.checkpoint(life, checkpoint_id, parallelism=2)

    go_on(6)
    given_up = list(story.contents)
    report = rewind(opened(story.store, 90), "job", FakeIds(90), checkpoint_id=2, write=True)
    del story.contents[3:]
    if then != "nothing":
        go_on(2)
    if then == "set forward":
        rewind(opened(story.store, 91), "job", FakeIds(91), savepoint=report.savepoint, write=True)
        story.contents = given_up
        go_on(1)
    return story


@pytest.mark.parametrize("then", ["nothing", "went on", "set forward"])
def test_job_that_was_set_back_is_not_rebuilt_into_what_was_given_up(then: str) -> None:
    """I10: whichever part of the registry is lost, the job keeps its position, and is not rewound a second time."""
    objects = (told := rewound_story(then)).store
    rewound_from = retained_manifests(opened(objects, 95), 1)[-1].rewound_from
    for lost in (("checkpoints/",), ("checkpoints/r",), ("checkpoints/", "epochs/", "job.json", "savepoints/")):
        story = Story(MemoryStore())
        for info in objects.list(""):
            story.store.put(info.key, objects.get(info.key))
        story.lose(*lost)
        report = story.rebuild()

        assert story.restored(report.checkpoint) == told.contents[-1], lost
        assert (report.lost, check_job(story.store, "job").problems) == ([], [])
        rebuilt = opened(story.store, 96)
        assert retained_manifests(rebuilt, 1)[-1].rewound_from == rewound_from is not None
        with service(story.store) as life:
            assert life.open()["latest"]["ref"]["uid"] == report.checkpoint.split(".")[2]


def test_lost_target_of_a_rewind_is_not_the_checkpoint_before() -> None:
    """I10: if changes of the checkpoint that a job was set back to are lost, a rebuild says so, and goes back more."""
    story = rewound_story("nothing")
    story.store.delete([story.object_of(2)])
    story.lose("checkpoints/", "epochs/", "job.json", "savepoints/")
    report = story.rebuild()

    assert [line.partition(" (")[0] for line in report.lost] == ["checkpoint 2"]
    assert CheckpointRef.parse(report.checkpoint).id == 1
    assert story.restored(report.checkpoint) == story.contents[1]


def test_savepoint_is_a_source(story: Story) -> None:
    """A savepoint tells the content of a checkpoint, even when all notes are lost, and proves that it existed."""
    jobs = opened(story.store)
    jobs.make_savepoint("kept", 25)
    jobs.make_savepoint("damaged", 24)
    story.store.put("job/savepoints/damaged.json", b"{}")
    story.store.delete([story.object_of(26), story.object_of(LAST)])
    story.lose("job.json", "epochs/", "checkpoints/")
    assert "savepoints/damaged.json cannot be read" in " ".join(check_job(story.store, "job").problems)
    report = story.rebuild()

    assert (report.is_proven, report.moved) == (True, [])
    assert report.checkpoint.startswith("25.")
    assert story.restored(report.checkpoint) == story.contents[25]


@pytest.mark.parametrize("is_there", [True, False])
def test_materialization_is_taken_if_it_is_there(is_there: bool) -> None:
    """A rebuilt checkpoint starts with a snapshot of the table; if that is missing, with the log before it."""
    handles = [handles_of([segment(checkpoint_id=number)], f"job/segments/h/{number}.seg")[0] for number in range(3)]
    snapshot = MaterializationHandle("op", ALL_GROUPS, 0, "m", "job/materialized/m.json", 1)
    tries = [
        CheckpointCandidate(
            id=number,
            uid=f"u{number}",
            epoch=1,
            stored_as=f"{number}.seg",
            created_ms=0,
            base=CheckpointRef(number - 1, 0, f"u{number - 1}") if number else None,
            query_id="",
            offsets="",
            operators=(),
            sets=(NotedSet(handle.entry.id, None),),
            start=[StateView((), []), StateView((snapshot,), []), None][number],
        )
        for number, handle in enumerate(handles)
    ]
    stored = {handle.entry.id: [handle] for handle in handles}
    missing = {} if is_there else {snapshot.index_key: "it is missing"}
    choice = choose(tries, Registry("job"), stored, missing)
    made = manifests_of(choice, Registry("job"), "uid", stored)

    assert [manifest.id for manifest in made] == ([1, 2] if is_there else [0, 1, 2])
    assert [manifest.kind for manifest in made] == [ManifestKind.COMPLETE, *[ManifestKind.DELTA] * (len(made) - 1)]
    assert made[0].materializations == ((snapshot,) if is_there else ())
    assert [handle for manifest in made for handle in manifest.segments] == (handles[1:] if is_there else handles)


def test_last_try_counts_though_another_hosts_clock_is_ahead() -> None:
    """I10: of two tries at a checkpoint, whose notes two hosts stored, the one that was planned last is restored."""
    handles = [handles_of([segment(attempt=number)], f"job/segments/h/{number}.seg")[0] for number in range(2)]
    ahead, right = FakeClock(), FakeClock()
    ahead.advance(3_600_000)
    stored_as = [f"{SystemIds(clock).unique_id()}.seg" for clock in (ahead, right)]
    tries = [
        CheckpointCandidate(
            id=1,
            uid=f"u{number}",
            epoch=1,
            stored_as=stored_as[number],
            created_ms=0,
            base=None,
            query_id="",
            offsets="",
            operators=(),
            sets=(NotedSet(handle.entry.id, None),),
            start=StateView((), []),
            planned_ms=1000 + number,
        )
        for number, handle in enumerate(handles)
    ]

    choice = choose(tries, Registry("job"), {handle.entry.id: [handle] for handle in handles})

    assert max(stored_as) == stored_as[0]
    assert [one.uid for one in choice.path] == ["u1"]


def test_lone_note_of_a_rewound_job_keeps_its_branch() -> None:
    """I3: from one complete note alone, whose base tells its branch, a checkpoint is rebuilt on that branch."""
    base = CheckpointRef(19, 5 * BRANCH_GENERATIONS + 1, "before")
    fields: dict[str, Any] = {"query_id": "", "offsets": "", "operators": (), "sets": ()}
    lone = CheckpointCandidate(
        id=20, uid="u", epoch=6, stored_as="o.seg", created_ms=0, base=base, start=StateView((), []), **fields
    )
    (made,) = manifests_of(choose([lone], Registry("job"), {}), Registry("job"), "uid", {})

    assert place_of_manifest(made) == (5, 20, 0)


def test_compacted_job_is_rebuilt() -> None:
    """A job whose log was compacted, and whose older objects are deleted, is rebuilt at every checkpoint (I10, I14)."""
    store = MemoryStore()
    with service(store, compaction=EAGER, retention=NOW) as life:
        job = MaintainedJob(store, life)
        for number in range(45):
            job.checkpoint()
            if number % 4 == 0 and number > 20:
                copy = MemoryStore()
                for key in job.keys("segments"):
                    copy.put(key, store.get(key))
                report = rebuild_registry(copy, "job", SystemClock(), SystemIds(), write=True)
                with service(copy) as other:
                    checkpoint_id, generation, uid = report.checkpoint.split(".")
                    assert int(checkpoint_id) == number
                    ref = {"id": number, "generation": int(generation), "uid": uid}
                    assert MaintainedJob(copy, other).restored(ref) == job.state
        assert job.metric("dstl_compactions_total") > 0


@pytest.mark.parametrize("lost", [("@lives/",), ("job/lives/",), ("@lives/", "job/lives/")])
def test_later_life_of_a_name_is_rebuilt(lost: tuple[str, ...]) -> None:
    """I10: a job that was created again is rebuilt as itself, even if no trace of its predecessor is left."""
    store = MemoryStore()
    made = []
    for content in (b"former", b"own"):
        if content == b"own":
            delete_job(store, "job", write=True)
        with service(store) as life:
            life.open()
            made.append(life.complete(0, None, life.append(content)))
    for folder in lost:
        store.delete([info.key for info in store.list(folder)])

    assert check_job(store, "job").problems
    if lost == ("@lives/",):
        with pytest.raises(CorruptDataError, match="@lives/job/00000000 is lost"):
            opened(store)
    assert rebuild_registry(store, "job", SystemClock(), SystemIds(), write=True).checkpoint.endswith(made[-1]["uid"])
    assert not check_job(store, "job").problems
    with service(store) as life:
        latest = life.open()["latest"]["ref"]
        assert life.restore(latest) == (True, [b"own"])


def lose_file(store: ObjectStore, key: str, _: str) -> None:
    store.delete([key])


def cut_file(store: ObjectStore, key: str, _: str) -> None:
    store.put(key, store.get(key)[:-1])


def lose_index(store: ObjectStore, _: str, key: str) -> None:
    store.delete([key])


def damage_index(store: ObjectStore, _: str, key: str) -> None:
    store.put(key, store.get(key).replace(b"sst", b"sts"))


LOSSES = {lose_file: "missing", cut_file: "bytes, not", lose_index: "missing", damage_index: "cannot be read"}


def with_snapshot(*, keep_log: bool = True) -> tuple[JobHistory, MaterializationIndex]:
    """Return a job whose last but one checkpoint starts with a snapshot, with or without the log before that."""
    history = JobHistory()
    log = [history.object(0), history.object(1)]
    history.complete(log[0], kind=ManifestKind.COMPLETE)
    history.complete(log[1])
    assert history.newest is not None
    index = index_of(history.newest.ref, job_uid=history.jobs.job_uid)
    handle = store_snapshot(history.store, index)
    history.newest, _ = history.jobs.create_manifest(
        replace(
            history.newest,
            kind=ManifestKind.COMPLETE,
            id=2,
            uid=history.ids.unique_id(),
            base=history.newest.ref,
            segments=(history.object(2),),
            materializations=(handle,),
        )
    )
    history.complete(history.object(3))
    if not keep_log:
        history.store.delete([handle.object_key for handle in log])
    return history, index


@pytest.mark.parametrize("lose", LOSSES)
def test_lost_snapshot_is_replaced_by_the_log_before_it(lose: Callable[..., None]) -> None:
    """I10: no checkpoint is rebuilt on an incomplete snapshot; the log before it is used while it exists."""
    history, index = with_snapshot()
    before = history.jobs.newest()
    assert before is not None
    assert rebuild_registry(history.store, "job", history.clock, history.ids).registry_problems == []
    lose(history.store, index.files[0].object_key, index.handle("job").index_key)

    report = rebuild_registry(history.store, "job", history.clock, history.ids, write=True)

    assert LOSSES[lose] in report.registry_problems[0]
    assert index.files[0].object_key in report.object_problems[0] or index.uid in report.object_problems[0]
    jobs = opened(history.store, 5)
    newest = jobs.newest()
    assert newest is not None
    state = jobs.state(newest.ref)
    assert (newest.id, newest.uid, state.materializations) == (3, before.uid, ())
    assert [handle.entry.id.checkpoint_id for handle in state.log] == [0, 1, 2, 3]
    assert [problem for problem in check_job(history.store, "job").problems if index.uid in problem] == []
    again = rebuild_registry(history.store, "job", history.clock, history.ids)
    assert (again.registry_problems, again.checkpoint) == ([], newest.ref.to_text())


@pytest.mark.parametrize("lose", LOSSES)
def test_lost_snapshot_without_the_log_before_it(lose: Callable[..., None]) -> None:
    """A checkpoint whose snapshot is lost and whose log was deleted is not rebuilt, and the report says why."""
    history, index = with_snapshot(keep_log=False)
    before = [info.key for info in history.store.list("")]
    lose(history.store, index.files[0].object_key, index.handle("job").index_key)

    with pytest.raises(CorruptDataError, match=f"checkpoint 3 .* is lost: .*{LOSSES[lose]}"):
        rebuild_registry(history.store, "job", history.clock, history.ids, write=True)
    assert {info.key for info in history.store.list("")} <= set(before)
