"""The jobs of a storage: how they are listed, and what remains of a deleted one."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstl_service.cli import main
from dstl_service.collection.job_deletion import delete_job, job_names
from dstl_service.registry.lives import first_epoch
from storage.errors import NotFoundError, UnavailableError
from storage.memory_store import MemoryStore
from storage.testing import Fault, FaultKind, FaultyStore, RecordingStore
from tests.unit.dstl_service.http_life import service

KEYS = [
    "job.json",
    "epochs/1.json",
    "checkpoints/1.json",
    *(f"segments/host/{number:05d}.seg" for number in range(2500)),
]


def store_with(*jobs: str) -> MemoryStore:
    store = MemoryStore()
    for job in jobs:
        for key in KEYS:
            store.put(f"{job}/{key}", b"12")
    return store


def test_jobs_are_listed_without_their_objects() -> None:
    """Objects beside jobs are not listed as jobs, and a job with many objects costs no more requests than another."""
    store = RecordingStore(store_with("a", "b.c", "b", "b0"))
    store.put("a-file", b"")
    store.put("other/thing", b"")
    for key in ("@deleted/job.json", "@deleted/job@1.json", "@fates/job/uid", "@lives/job/00000000"):
        store.put(key, b"")  # also of a deleted job that is called `job`

    assert list(job_names(store)) == ["a", "b.c", "b", "b0"]
    assert store.count("list") <= 10


def test_job_is_deleted_whole() -> None:
    """No object of the job remains, and no object of a job whose name begins with the same characters is deleted."""
    store = store_with("job", "job-2")

    counted = delete_job(store, "job")
    assert (counted.objects, counted.size_bytes, counted.is_written) == (len(KEYS), 2 * len(KEYS), False)
    assert len(list(store.list("job/"))) == len(KEYS)
    assert delete_job(store, "job", write=True).objects == len(KEYS)
    assert [info.key for info in store.list("job/")] == []
    assert len(list(store.list("job-2/"))) == len(KEYS)
    with pytest.raises(NotFoundError):
        delete_job(store, "job")


def test_interrupted_deletion_is_repeated() -> None:
    """A partly deleted job is still that job until its last object is gone."""
    inner = store_with("job")
    with pytest.raises(UnavailableError):
        delete_job(FaultyStore(inner, Fault("delete", FaultKind.FAIL_BEFORE, skip=1)), "job", write=True)
    assert list(job_names(inner)) == ["job"]

    delete_job(inner, "job", write=True)
    assert [info.key for info in inner.list("")] == ["@lives/job/00000000"]


def test_name_of_a_deleted_job_is_used_again() -> None:
    """I4: a coordinator that knew the old job opens the new one: checkpoints start at 0, and no epoch is used again."""
    store = MemoryStore()
    with service(store) as life:
        for _ in range(2):
            life.epoch = life.client.post("/v1/jobs/job/epochs", json={"owner": "test"}).json()["epoch"]
        assert life.epoch > 1
        life.complete(0, None, life.append())
        delete_job(store, "job", write=True)

        opened = life.client.post("/v1/jobs/job/epochs", json={"owner": "test"}).json()
        assert (opened["epoch"], opened["latest"]) == (first_epoch(1), None)
        life.epoch = opened["epoch"]
        assert life.complete(0, None, life.append(b"other"))["id"] == 0


@pytest.mark.parametrize("payload", [b"set", b"another"])
def test_sidecar_that_knew_a_deleted_job_serves_the_new_one(payload: bytes) -> None:
    """
    I5: checkpoints and attempts of a new job equal those of the deleted job of its name, and so do the sets' bytes.

    A sidecar that is not the coordinator learns of neither. Its objects of the old job are not used for the new one.
    """
    store = MemoryStore()
    with service(store) as sidecar, service(store) as coordinator:
        coordinator.open()  # a second time, so that the second job's epoch is the lower one
        uid = coordinator.open()["job_uid"]
        sidecar.epoch = coordinator.epoch
        ref = sidecar.append(b"set", job_uid=uid)
        (handle,) = sidecar.persist(ref).json()["handles"]
        sidecar.restore(coordinator.complete(0, None, {**ref, "handle": handle}))
        delete_job(store, "job", write=True)

        for _ in range(2):
            uid = coordinator.open()["job_uid"]
            sidecar.epoch = coordinator.epoch
            ref = sidecar.append(payload, job_uid=uid)
            (handle,) = sidecar.persist(ref).json()["handles"]
        made = coordinator.complete(0, None, {**ref, "handle": handle})
        assert sidecar.restore(made) == coordinator.restore(made) == (True, [payload])


def test_sidecar_that_knew_a_deleted_job_restores_the_new_one() -> None:
    """A host that gets its first task of the new job after a checkpoint receives a restore request before any set."""
    store = MemoryStore()
    with service(store) as sidecar, service(store) as coordinator:
        for _ in range(2):
            coordinator.open()
        sidecar.restore(coordinator.complete(0, None, coordinator.append()))
        delete_job(store, "job", write=True)

        coordinator.open()
        made = coordinator.complete(0, None, coordinator.append(b"other"), uid="other")
        assert sidecar.restore(made) == (True, [b"other"])


def test_set_of_a_deleted_job_is_refused() -> None:
    """I4: a task of the deleted job that still runs adds nothing to the new one, because its epoch is older."""
    store = MemoryStore()
    with service(store) as life:
        uid, epoch = life.open()["job_uid"], life.epoch
        delete_job(store, "job", write=True)
        life.open()
        life.epoch = epoch
        answers = [life.append_raw(), life.append_raw(job_uid=uid)]
        assert [(answer.status_code, answer.json()["kind"]) for answer in answers] == [
            (409, "fenced"),
            (404, "not_found"),
        ]


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`dstl jobs` and `dstl delete`; `dstl delete` deletes nothing without being told to."""
    for key in ("job.json", "segments/host/1.seg"):
        path = tmp_path / "job" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}")
    storage = ["--storage", f"file://{tmp_path}"]

    assert main(["jobs", *storage]) == 0
    assert main(["delete", *storage, "job"]) == 0
    assert main(["jobs", *storage]) == 0
    assert main(["delete", *storage, "job", "--write", "--now"]) == 0
    assert main(["jobs", *storage]) == 0
    assert main(["delete", *storage, "job"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["job", "job", "job", "job"]
    assert "2 objects of 4 bytes would be deleted" in lines[1]


def test_leftovers_of_no_job_are_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """C9: objects of a job that was never created can be deleted, and nothing else treats them as a job."""
    (tmp_path / "never" / "segments" / "host").mkdir(parents=True)
    (tmp_path / "never" / "segments" / "host" / "1.seg").write_bytes(b"left")
    storage = ["--storage", tmp_path.as_uri()]

    assert main(["gc", *storage, "--delete", "never"]) == 2
    assert "dstl delete" in capsys.readouterr().err
    assert main(["delete", *storage, "--write", "never"]) == 0
    assert "fsck --rebuild" in capsys.readouterr().out
    assert main(["delete", *storage, "--write", "never"]) == 2
