"""Commands of `dstl` in forked processes: they behave as in processes that were started for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_until
from tools.servers.service.forked import ForkedCommand, can_be_forked

DSTL = [sys.executable, "-m", "dstl_service"]


def test_exit_code_and_output_are_those_of_the_command(tmp_path: Path) -> None:
    """A command that fails has its exit code, and its log what it wrote after what the log had."""
    log = tmp_path / "log"
    log.write_text("before\n", encoding="utf-8")

    command = ForkedCommand([*DSTL, "jobs", "--storage", "nowhere://x"], os.environ, log)

    assert command.wait(60) == 2
    assert command.poll() == 2
    before, said = log.read_text(encoding="utf-8").split("\n", 1)
    assert before == "before"
    assert "nowhere" in said


def test_service_has_the_given_environment(tmp_path: Path) -> None:
    """Settings come from the given environment; a service runs until it is killed, with its own command line."""
    socket = tmp_path / "s"
    environment = {"DSTL_STORAGE": tmp_path.as_uri()}
    command = ForkedCommand([*DSTL, "serve", "--socket", str(socket)], environment, tmp_path / "log")
    try:
        wait_until(lambda: socket.exists() or command.poll() is not None, what="the socket of the service")
        assert command.poll() is None
        line = Path(f"/proc/{command.pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        assert line == [os.fsencode(word) for word in (*DSTL, "serve", "--socket", str(socket))]
        with pytest.raises(subprocess.TimeoutExpired):
            command.wait(0.01)
    finally:
        command.kill()
    assert command.wait(60) == -signal.SIGKILL
    command.send_signal(signal.SIGTERM)  # to nobody


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ([*DSTL, "serve"], True),
        (["ip", "netns", "exec", "a", *DSTL, "serve"], False),
        (["/usr/bin/python3", "-m", "dstl_service", "serve"], False),
        ([sys.executable, "-m", "other"], False),
    ],
)
def test_other_programs_are_not_forked(command: list[str], expected: bool) -> None:
    """Only this Python's own `dstl` can be a fork."""
    assert can_be_forked(command, {}) == expected


def test_variables_that_count_at_the_start_are_heeded() -> None:
    """A process that is to have another allocator or another Python's options is started."""
    assert can_be_forked([*DSTL, "serve"], {**os.environ, "DSTL_TOKEN": "x"})
    assert not can_be_forked([*DSTL, "serve"], {**os.environ, "MALLOC_ARENA_MAX": "1"})
    assert not can_be_forked([*DSTL, "serve"], {"PYTHONWARNINGS": "error::ResourceWarning"})


def test_process_with_another_clock_is_not_forked(tmp_path: Path) -> None:
    """A folder whose module Python runs at its start changes a process that is started, and no fork."""
    assert can_be_forked([*DSTL, "serve"], {"PYTHONPATH": f"{tmp_path}{os.pathsep}"})
    (tmp_path / "sitecustomize.py").touch()
    assert not can_be_forked([*DSTL, "serve"], {"PYTHONPATH": f"/none{os.pathsep}{tmp_path}"})
