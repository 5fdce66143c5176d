"""The errors of the test servers' start-up code name what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.servers.maven import maven_jars
from tools.servers.programs import ServerError, go_program
from tools.servers.s3_server import S3Server

pytestmark = pytest.mark.integration


def test_missing_go_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Go and without a built program, the error names the package to install."""
    monkeypatch.setenv("DSTL_STACK_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerError, match="install Go"):
        go_program("some", "example.org/some", "v1.0.0")


def test_built_program_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first run builds the program."""
    monkeypatch.setenv("DSTL_STACK_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    program = tmp_path / "bin-some-v1.0.0" / "some"
    program.parent.mkdir()
    program.touch()
    assert go_program("some", "example.org/some", "v1.0.0") == program


def test_missing_maven_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Maven, existing jars are used, and the error for others names Maven."""
    monkeypatch.setenv("DSTL_STACK_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "some.jar").touch()

    assert maven_jars("there", programs=["example.org:some:1"]) == [tmp_path / "there" / "some.jar"]
    with pytest.raises(ServerError, match=r"example.org:other:1 must be fetched once.*Maven \(mvn\) is not on PATH"):
        maven_jars("missing", single=["example.org:other:1"])


def test_failed_start_quotes_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that ends at once is not waited for, and the end of its log is shown."""
    monkeypatch.setattr(S3Server, "access_key", "")
    with pytest.raises(ServerError, match="did not start"):
        S3Server(tmp_path).start()
