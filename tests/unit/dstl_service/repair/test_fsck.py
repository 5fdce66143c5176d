"""A job's stored state is verified as a whole, and all damage is reported with the object's name (I10)."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from dstl_service.cli import main
from dstl_service.formats.manifest import ManifestKind
from dstl_service.repair.fsck import check_job
from dstl_service.wire import CheckpointRef
from storage.open import open_store
from storage.testing import RecordingStore
from tests.rocksdb_files import sst_file
from tests.unit.dstl_service.job_history import JobHistory
from tests.unit.dstl_service.snapshots import FILES, index_of, store_snapshot


@pytest.fixture
def job(tmp_path: Path) -> list[Path]:
    """Store three checkpoints with an object each; return the objects' files."""
    history = JobHistory(open_store(f"file://{tmp_path}"))
    for number in range(3):
        history.complete(history.object(number))
    return sorted(tmp_path.glob("job/segments/**/*.seg"))


def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["fsck", "--storage", f"file://{tmp_path}", "job"])
    return code, capsys.readouterr().out


def test_sound_job_has_no_problems(job: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All checkpoints, objects and segments of a sound job are counted and verified."""
    size = sum(path.stat().st_size for path in job)

    assert run(tmp_path, capsys) == (
        0,
        f"3 checkpoints, 3 segments in 3 objects, {size} bytes verified, 0 problems\n",
    )


def test_every_damage_is_reported(job: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flipped bit and a missing object are both reported by name in one run (I10)."""
    data = bytearray(job[0].read_bytes())
    data[len(data) // 2] ^= 1
    job[0].write_bytes(data)
    job[2].unlink()

    code, out = run(tmp_path, capsys)

    assert code == 1
    assert job[0].name in out
    assert f"{job[2].name} named by a checkpoint is missing" in out
    assert "2 problems" in out


def test_exchanged_object_is_reported(job: list[Path], tmp_path: Path) -> None:
    """A sound object in the place of another one is reported, not accepted."""
    job[0].write_bytes(job[1].read_bytes())
    store = open_store(f"file://{tmp_path}")

    report = check_job(store, "job")

    assert [job[0].name in problem for problem in report.problems] == [True]


def test_broken_chain_is_reported(job: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged manifest is reported by name; the chain before it is still verified."""
    manifest = tmp_path / "job" / "checkpoints" / "00000000000000000001.000000.json"
    manifest.write_bytes(manifest.read_bytes()[:-2])

    code, out = run(tmp_path, capsys)

    assert code == 1
    assert manifest.name in out
    assert "1 checkpoints, 1 segments" in out


def damaged(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name", ["job.json", "epochs/00000000000000000001.json", "checkpoints/00000000000000000000.000000.json"]
)
def test_damaged_registry_is_reported(
    job: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A ``job.json``, an epoch's record or a fence that is damaged is named, and the rest is verified (I10)."""
    path = tmp_path / "job" / name
    path.write_bytes(path.read_bytes()[:-3])

    code, out = run(tmp_path, capsys)

    assert code == 1
    assert f"job/{name} cannot be read" in out
    assert "3 checkpoints, 3 segments in 3 objects" in out


@pytest.mark.parametrize("name", ["job.json", "epochs/00000000000000000001.json"])
def test_missing_registry_object_is_reported(
    job: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A registry without ``job.json``, or with manifests of an epoch that it does not know, is not sound."""
    (tmp_path / "job" / name).unlink()

    code, out = run(tmp_path, capsys)

    assert code == 1
    assert f"job/{name} is missing" in out


def test_missing_manifest_is_reported(job: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If a base of the newest checkpoint is missing, its manifest is reported by name."""
    (tmp_path / "job" / "checkpoints" / "00000000000000000001.000000.json").unlink()

    code, out = run(tmp_path, capsys)

    assert code == 1
    assert "manifest job/checkpoints/00000000000000000001.000000.json is missing" in out


def test_manifest_in_wrong_place_is_reported(
    job: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sound manifest in the place of another one is reported, not accepted."""
    folder = tmp_path / "job" / "checkpoints"
    (folder / "00000000000000000001.000007.json").write_bytes(
        (folder / "00000000000000000001.000000.json").read_bytes()
    )

    code, out = run(tmp_path, capsys)

    assert code == 1
    assert "00000000000000000001.000007.json is a copy of 1.0." in out


@pytest.mark.parametrize("damaged", [None, "*.json", "*.sst"])
def test_snapshots_are_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str], damaged: str | None) -> None:
    """I10: every byte of a materialization is read; a missing index and a flipped bit are reported by their names."""
    store = open_store(f"file://{tmp_path}")
    history = JobHistory(store)
    handle = history.object(0)
    snapshot = store_snapshot(store, index_of(CheckpointRef(0, 0, "u"), job_uid=history.jobs.job_uid))
    history.complete(handle, kind=ManifestKind.COMPLETE, materializations=(snapshot,))
    path = next((tmp_path / "job" / "materialized").rglob(damaged or "*"))
    if damaged == "*.sst":
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    elif damaged is not None:
        path.unlink()

    code, out = run(tmp_path, capsys)

    if damaged is None:
        assert (code, f"{handle.object_size_bytes + snapshot.size_bytes} bytes verified, 0 problems" in out) == (
            0,
            True,
        )
    else:
        assert (code, "1 problems" in out) == (1, True)
        assert path.name in out


def test_every_damaged_file_of_snapshots_is_reported_once(tmp_path: Path) -> None:
    """I10: a damaged file hides no other; shared files are read once, and RocksDB's checksums are verified."""
    store = RecordingStore(open_store(f"file://{tmp_path}"))
    history = JobHistory(store)
    unsound = {**FILES, "000010.sst": b"?" + sst_file(b"third")[1:]}
    index = index_of(CheckpointRef(0, 0, "u"), job_uid=history.jobs.job_uid, files=unsound)
    later = replace(index, uid="later", version=CheckpointRef(1, 0, "u"))
    first, second = (store_snapshot(store, one, unsound) for one in (index, later))
    history.complete(history.object(0), kind=ManifestKind.COMPLETE, materializations=(first,))
    history.complete(history.object(1), materializations=(second,))
    keys = {file.name: file.object_key for file in index.files}
    damaged(tmp_path / keys["000008.sst"])
    store.delete([keys["000009.sst"]])
    store.clear()

    report = check_job(store, "job")

    for name in ("000008.sst", "000009.sst", "000010.sst"):
        assert sum(keys[name] in problem for problem in report.problems) == 1
    assert len(report.problems) == 3
    assert [problem for problem in report.problems if "from a damaged table" in problem and "000010.sst" in problem]
    read = Counter(store.keys("get_range")) + Counter(store.keys("get"))
    assert {read[key] for key in keys.values()} == {1}


def test_earlier_log_and_note_are_verified(tmp_path: Path) -> None:
    """Objects named only by a complete manifest's earlier log, or by its note, are verified too."""
    store = open_store(f"file://{tmp_path}")
    history = JobHistory(store)
    history.complete(history.object(0), note=history.object(0))
    history.complete(history.object(1), kind=ManifestKind.COMPLETE)
    assert (check_job(store, "job").objects, check_job(store, "job").problems) == (3, [])

    paths = sorted(tmp_path.glob("job/segments/**/*.seg"))
    for path in paths:
        damaged(path)

    assert len(check_job(store, "job").problems) == 3


def test_unknown_job_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For a job that does not exist nothing is verified; the exit code differs from that of a damaged job."""
    assert run(tmp_path, capsys) == (2, "")


def test_report_as_json(job: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report is also available as a JSON document."""
    assert main(["fsck", "--storage", f"file://{tmp_path}", "--json", "job"]) == 0

    assert json.loads(capsys.readouterr().out)["checkpoints"] == 3
