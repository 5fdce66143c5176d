"""A job's stored state is verified as a whole, and every damage is told with the object's name (I10)."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstl_service.cli import main
from dstl_service.fsck import check_job
from dstl_service.job_store import JobStore
from storage.clock import SystemClock, SystemIds
from storage.open import open_store
from tests.unit.dstl_service.world import World


@pytest.fixture
def job(tmp_path: Path) -> list[Path]:
    """Three checkpoints with an object each; the objects' files."""
    world = World(open_store(f"file://{tmp_path}"))
    for number in range(3):
        world.complete(world.object(number))
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
    """A sound object in the place of another one is not taken for it."""
    job[0].write_bytes(job[1].read_bytes())
    store = open_store(f"file://{tmp_path}")

    report = check_job(store, JobStore(store, "job", SystemClock(), SystemIds()), "job")

    assert [job[0].name in problem for problem in report.problems] == [True]


def test_broken_chain_is_reported(job: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged manifest is reported by name; what lies before it in the chain is still verified."""
    manifest = tmp_path / "job" / "checkpoints" / "00000000000000000001.000000.json"
    manifest.write_bytes(manifest.read_bytes()[:-2])

    code, out = run(tmp_path, capsys)

    assert code == 1
    assert manifest.name in out
    assert "1 checkpoints, 1 segments" in out
