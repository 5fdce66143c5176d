"""The command `dstl`: which arguments are refused before anything is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dstl_service.cli import main
from dstl_service.registry.job_store import JobStore
from storage.clock import SystemClock, SystemIds
from storage.local_store import LocalStore
from tests.unit.dstl_service.samples import manifest, opened


@pytest.mark.parametrize(
    "command",
    [
        ["checkpoints"],
        ["gc", "--delete"],
        ["savepoints"],
        ["delete", "--write", "--now"],
        ["undelete"],
        ["audit"],
        ["rewind", "--checkpoint", "0", "--write"],
        ["fsck"],
        ["fsck", "--rebuild", "--write"],
    ],
)
def test_path_in_a_job_is_no_job(tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The folder of a job's life has a `job.json` too; every command refuses it by its name."""
    store = LocalStore(tmp_path)
    jobs = JobStore(store, "job", SystemClock(), SystemIds())
    jobs.open(16)
    store.put("job/lives/00000001/job.json", store.get("job/job.json"))
    before = [info.key for info in store.list("")]

    assert main([*command, "--storage", store.url, "job/lives/00000001"]) == 2

    assert "job name 'job/lives/00000001' is not allowed" in capsys.readouterr().err
    assert [info.key for info in store.list("")] == before


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (["fsck", "--write"], "--rebuild"),
        (["fsck", "--up-to", "3"], "--rebuild"),
        (["savepoints", "--checkpoint", "3"], "--create NAME"),
    ],
)
def test_option_without_the_one_it_belongs_to(
    tmp_path: Path, command: list[str], missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A forgotten option is named: nothing is rebuilt that was only to be verified, and no checkpoint seems kept."""
    store = LocalStore(tmp_path)
    jobs = opened(store)
    epoch, _ = jobs.claim("test")
    jobs.create_manifest(manifest(0, epoch, job_uid=jobs.job_uid))
    (tmp_path / "job/job.json").write_text("damaged")
    before = [info.key for info in store.list("")]

    assert main([*command, "--storage", store.url, "job"]) == 2

    assert missing in capsys.readouterr().err
    assert [info.key for info in store.list("")] == before


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["gc", "job", "--del"], "unrecognized arguments: --del"),
        (["rewind", "job", "--checkpoint", "1", "--w"], "unrecognized arguments: --w"),
        (["delete", "job", "--wr"], "unrecognized arguments: --wr"),
        (["gc", "job", "--age-min-s", "-5"], "--age-min-s must not be negative: -5"),
        (["serve", "--socket", "/tmp/x", "--port", "7071"], "--host and --port are for TCP"),
    ],
)
def test_options_are_not_guessed(
    tmp_path: Path, command: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What deletes or rewinds is written in full, and an option without effect is no option."""
    store = LocalStore(tmp_path)
    opened(store)

    try:
        code: object = main([*command, "--storage", store.url])
    except SystemExit as exit_:
        code = exit_.code

    assert code == 2
    assert told in capsys.readouterr().err


def test_log_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the file; there is no traceback."""
    file = tmp_path / "none" / "log"

    assert main(["serve", "--storage", tmp_path.as_uri(), "--log-file", str(file)]) == 2

    assert f"log_file {file} cannot be written: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["jobs"], ["checkpoints", "job"], ["fsck", "job"], ["delete", "job"]])
def test_storage_that_does_not_exist(tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped folder is an error that names it; it is not made, and does not count as a storage without jobs."""
    name, *arguments = command

    assert main([name, "--storage", (tmp_path / "mistyped").as_uri(), *arguments]) != 0

    assert f"there is no folder {tmp_path / 'mistyped'}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        (["checkpoints", "mistyped"], 2, "there is no job 'mistyped' in {0}; `dstl jobs --storage {0}` lists those"),
        (["jobs"], 0, "there are no jobs in {0}; it must be the storage that the queries' backend has"),
        (["audit", "mistyped"], 0, "nothing is recorded of a job 'mistyped' in {0}"),
    ],
)
def test_storage_without_the_job(
    tmp_path: Path, command: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a mistyped storage or job has nothing to show, that is said, with the next step."""
    name, *arguments = command
    url = LocalStore(tmp_path).url

    assert main([name, "--storage", url, *arguments]) == code

    printed = capsys.readouterr()
    assert (printed.out, told.format(url) in printed.err) == ("", True)


@pytest.mark.parametrize("command", [["savepoints", "--delete"], ["rewind", "--savepoint"], ["fork", "--savepoint"]])
def test_mistyped_savepoint(tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the command that lists the savepoints of the job."""
    store = LocalStore(tmp_path)
    jobs = opened(store)
    epoch, _ = jobs.claim("test")
    jobs.create_manifest(manifest(0, epoch, job_uid=jobs.job_uid))
    arguments = ["job", "other"] if command[0] == "fork" else ["job"]

    assert main([*command, "mistyped", "--storage", store.url, *arguments]) == 2

    assert "has no savepoint 'mistyped'; `dstl savepoints` lists those it has" in capsys.readouterr().err


def test_savepoint_is_not_deleted_by_a_command_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One command cannot delete one savepoint and then fail to create another."""
    store = LocalStore(tmp_path)
    jobs = opened(store)
    epoch, _ = jobs.claim("test")
    jobs.create_manifest(manifest(0, epoch, job_uid=jobs.job_uid))
    command = ["savepoints", "--storage", store.url, "job"]
    assert main([*command, "--create", "old"]) == 0

    with pytest.raises(SystemExit):
        main([*command, "--delete", "old", "--create", "new", "--checkpoint", "7"])

    assert "not allowed with argument" in capsys.readouterr().err
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("old  0.1.")


def test_job_without_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That a job has lost no rows is said; the list is empty."""
    store = LocalStore(tmp_path)
    opened(store)

    assert main(["losses", "--storage", store.url, "job"]) == 0

    assert capsys.readouterr() == ("", "dstl: job 'job' has lost no rows, as of its newest checkpoint\n")


def test_job_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job whose first batch is not complete has an empty list, and that is said."""
    store = LocalStore(tmp_path)
    opened(store)

    assert main(["checkpoints", "--storage", store.url, "job"]) == 0

    assert capsys.readouterr() == ("", "dstl: job 'job' has completed no checkpoint yet\n")


def test_fork_is_recorded_on_both_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`dstl fork` creates the job, says what to do, and the audit log of either job names the other one."""
    store = LocalStore(tmp_path)
    jobs = opened(store)
    epoch, _ = jobs.claim("test")
    jobs.create_manifest(manifest(0, epoch, job_uid=jobs.job_uid))
    storage = ["--storage", store.url]

    assert main(["fork", *storage, "job", "fork"]) == 0
    assert "job fork begins with the state of job job at checkpoint 0.1." in capsys.readouterr().out
    assert main(["fork", *storage, "job", "../fork"]) == 2
    assert main(["fork", *storage, "--checkpoint", "7", "job", "other"]) == 2
    assert main(["audit", *storage, "job"]) == 0
    assert "fork  fork=fork  checkpoint=0.1." in capsys.readouterr().out
    assert main(["audit", *storage, "fork"]) == 0
    assert "begin as a fork  parent=job  checkpoint=0.1." in capsys.readouterr().out
    assert main(["savepoints", *storage, "job"]) == 0
    assert "for fork fork@0" in capsys.readouterr().out
    assert main(["delete", *storage, "job"]) == 0
    assert "would be deleted; delete its forks first: fork" in capsys.readouterr().out
    assert main(["delete", *storage, "--write", "job"]) == 2
    assert "forks need its objects: fork" in capsys.readouterr().err


def test_fork_with_other_key_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`dstl fork --max-parallelism` says what the first start does; the number that the job has is refused."""
    store = LocalStore(tmp_path)
    jobs = opened(store)
    epoch, _ = jobs.claim("test")
    jobs.create_manifest(manifest(0, epoch, job_uid=jobs.job_uid))
    command = ["fork", "--storage", store.url, "--max-parallelism"]

    assert main([*command, str(jobs.max_parallelism), "job", "fork"]) == 2
    assert f"has max_parallelism {jobs.max_parallelism} already" in capsys.readouterr().err
    assert main([*command, "32769", "job", "fork"]) == 2
    assert "within 1..32768" in capsys.readouterr().err
    assert main([*command, "5", "job", "fork"]) == 0
    assert f"rewrites the state from {jobs.max_parallelism} key groups to 5" in capsys.readouterr().out


@pytest.mark.parametrize(("target", "code", "said"), [("| true", 141, ""), ("> /dev/full", 2, "cannot be written")])
def test_output_that_nobody_takes(tmp_path: Path, target: str, code: int, said: str) -> None:
    """A reader such as `head` that ends early, or a full disk, is no traceback."""
    JobStore(LocalStore(tmp_path), "job", SystemClock(), SystemIds()).open(16)
    command = [sys.executable, "-m", "dstl_service", "jobs", "--storage", f"file://{tmp_path}"]
    line = f'"$@" {target}; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", line, "bash", *command], capture_output=True, text=True, check=False)

    assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (code, True, False)


@pytest.mark.parametrize(
    ("module", "later"),
    [("commands.serve", ("numpy", "pyarrow")), ("cli", ("numpy", "pyarrow", "fastapi", "uvicorn"))],
)
def test_start_loads_no_more_than_it_needs(module: str, later: tuple[str, ...]) -> None:
    """A query waits for its sidecar, so what compactions and snapshots need comes later; only `serve` has an API."""
    program = f"import sys, dstl_service.{module}; sys.exit(bool({set(later)} & sys.modules.keys()))"

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
