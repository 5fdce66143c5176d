"""The archive of classes: it appears complete or not at all, and errors say why."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from backend_client.__main__ import main
from backend_client.spark.api import class_archive
from backend_client.spark.api.class_archive import write_class_archive
from storage.errors import InternalError, InvalidInputError


def run_as(monkeypatch: pytest.MonkeyPatch, returncode: int, content: bytes | None) -> list[str]:
    """Have the job end like this, with that archive; return the options that it got."""
    options: list[str] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        options.append(env["PYSPARK_SUBMIT_ARGS"])
        if content is not None:
            made = env["PYSPARK_SUBMIT_ARGS"].partition("-XX:ArchiveClassesAtExit=")[2].partition(" ")[0]
            Path(made).write_bytes(content)
        return subprocess.CompletedProcess(command, returncode, "what the job said", None)

    monkeypatch.setattr(class_archive.subprocess, "run", run)  # type: ignore[attr-defined]
    return options


@pytest.mark.parametrize(("returncode", "content"), [(1, None), (1, b"half"), (0, None)])
def test_failed_job_leaves_the_older_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returncode: int, content: bytes | None
) -> None:
    """The error has the job's words, and nothing else stays."""
    (tmp_path / "archive").write_bytes(b"older")
    run_as(monkeypatch, returncode, content)

    with pytest.raises(InternalError, match="what the job said"):
        write_class_archive(tmp_path / "archive")

    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"older"]


def test_archive_is_made_with_the_jobs_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It replaces an older one; the command names the option for drivers."""
    (tmp_path / "archive").write_bytes(b"older")
    options = run_as(monkeypatch, 0, b"newer")

    assert main(["class-archive", str(tmp_path / "archive"), "--", "--packages", "a:b:1"]) == 0

    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"newer"]
    assert options[0].endswith("--packages a:b:1 pyspark-shell")
    assert f"-XX:SharedArchiveFile={tmp_path / 'archive'}" in capsys.readouterr().out


def test_job_does_not_use_the_hosts_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job in the storage of that service would stay there; who may own folders of the host holds for the job too."""
    monkeypatch.setenv("DSTL_SERVICE", "http://127.0.0.1:7071")
    monkeypatch.setenv("DSTL_CONFIG", "/etc/dstl/dstl.toml")
    monkeypatch.setenv("DSTL_TRUSTED_UIDS", "4711")
    seen: dict[str, str] = {}

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        seen.update(env)
        return subprocess.CompletedProcess(command, 1, "", None)

    monkeypatch.setattr(class_archive.subprocess, "run", run)  # type: ignore[attr-defined]

    with pytest.raises(InternalError):
        write_class_archive(tmp_path / "archive")

    assert {name for name in seen if name.startswith("DSTL_")} == {"DSTL_TRUSTED_UIDS"}


def test_options_keep_their_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each option reaches spark-submit as it was given."""
    options = run_as(monkeypatch, 0, b"newer")

    write_class_archive(tmp_path / "archive", ["--conf", "spark.driver.defaultJavaOptions=-Da=1 -Db=2"])

    assert "spark.driver.defaultJavaOptions=-Da=1 -Db=2" in shlex.split(options[0])


def test_path_that_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says so, and nothing else stays."""
    (tmp_path / "archive").mkdir()
    run_as(monkeypatch, 0, b"newer")

    with pytest.raises(InvalidInputError, match="choose another path"):
        write_class_archive(tmp_path / "archive")

    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


@pytest.mark.parametrize(("name", "message"), [("with space/archive", "choose another path"), ("none/a", "written")])
def test_place_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str) -> None:
    """It is refused at once."""
    with pytest.raises(InvalidInputError, match=message):
        write_class_archive(tmp_path / name)
    assert main(["class-archive", str(tmp_path / name)]) == 1
    assert message in capsys.readouterr().err
