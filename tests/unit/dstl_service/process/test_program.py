"""When a sidecar whose program is gone ends, in the time of an event loop that the test advances explicitly."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dstl_service.process.program import ProgramWatch
from tests.support.clockwork import Clockwork

LONG = 40
"""Checks within the longest time for which work is waited for, and some more."""


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Clockwork:
    """Return the loop of the test's watches."""
    made = Clockwork()
    monkeypatch.setattr("dstl_service.process.program.asyncio.get_running_loop", lambda: made)
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file of the program."""
    made = tmp_path / "__init__.py"
    made.write_text("")
    return made


def watch(file: Path, stopped: list[str], is_in_use: Callable[[], bool] = lambda: False) -> None:
    ProgramWatch(lambda: stopped.append("stopped"), is_in_use, file).start()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_process_without_its_program_ends(loop: Clockwork, file: Path, *, is_replaced: bool) -> None:
    """Files that a cluster manager deletes or an upgrade replaces; what is imported later is not the program's."""
    stopped: list[str] = []
    watch(file, stopped)
    loop.pass_time(LONG)
    assert not stopped

    other = file.with_name("new.py")
    other.write_text("# newer\n")
    file.unlink()
    if is_replaced:
        other.rename(file)
    loop.pass_time(2)
    assert stopped == ["stopped"]


def test_file_system_that_fails_for_a_moment_stops_nothing(loop: Clockwork, file: Path) -> None:
    """A file that one check does not find, and the next one does, is the program."""
    stopped: list[str] = []
    watch(file, stopped)

    for _ in range(LONG):
        file.rename(file.with_name("away"))
        loop.pass_time()
        os.rename(file.with_name("away"), file)
        loop.pass_time()
    assert not stopped


def test_work_is_waited_for_but_not_forever(loop: Clockwork, file: Path) -> None:
    """Requests and uploads end first; on a host that is never quiet the process ends all the same."""
    stopped: list[str] = []
    in_use = [True]
    watch(file, stopped, lambda: in_use[0])
    file.unlink()
    loop.pass_time(10)
    assert not stopped

    in_use[0] = False
    loop.pass_time()
    assert stopped == ["stopped"]

    file.write_text("")
    in_use[0] = True
    watch(file, stopped, lambda: in_use[0])
    file.unlink()
    loop.pass_time(LONG)
    assert stopped == ["stopped"] * 2


def test_program_that_is_not_in_files_is_not_watched(loop: Clockwork, tmp_path: Path) -> None:
    """One in an archive has no file that could be compared."""
    stopped: list[str] = []
    watch(tmp_path / "package.zip" / "__init__.py", stopped)
    assert not loop.timers
