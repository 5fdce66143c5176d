"""When an unused process stops, in the time of an event loop that the test advances explicitly."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dstl_service.process.idle import IdleWatch
from tests.support.clockwork import Clockwork

IDLE_S = 30


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Clockwork:
    """Return the loop of the test's watches."""
    made = Clockwork()
    monkeypatch.setattr("dstl_service.process.idle.asyncio.get_running_loop", lambda: made)
    return made


def watch(
    stopped: list[str], is_busy: Callable[[], bool] = lambda: False, is_used: Callable[[], bool] = lambda: True
) -> IdleWatch:
    made = IdleWatch(IDLE_S, lambda: stopped.append("stopped"), is_busy, is_used)
    made.start()
    return made


def test_idle_process_is_stopped(loop: Clockwork) -> None:
    """A request postpones the end by one idle time; without another one the process stops."""
    stopped: list[str] = []
    made = watch(stopped)
    made.request_began()
    made.request_ended()

    loop.pass_time()
    assert not stopped
    loop.pass_time()
    assert stopped


def test_running_request_keeps_the_process(loop: Clockwork) -> None:
    """A restore that streams for hours counts as use; the idle time starts at its end."""
    stopped: list[str] = []
    made = watch(stopped)
    made.request_began()
    for _ in range(3):
        loop.pass_time()
    made.request_ended()
    loop.pass_time()
    assert not stopped

    loop.pass_time()
    assert stopped


def test_background_work_keeps_the_process(loop: Clockwork) -> None:
    """A snapshot upload is not interrupted by the lack of requests."""
    stopped: list[str] = []
    busy = [True]
    watch(stopped, lambda: busy[0])
    for _ in range(3):
        loop.pass_time()
    assert not stopped

    busy[0] = False
    loop.pass_time()
    assert stopped


def test_process_that_reaches_no_job_is_stopped_soon(loop: Clockwork) -> None:
    """With wrong credentials every request fails; the next process has the environment of its starter."""
    stopped: list[str] = []
    made = watch(stopped, is_used=lambda: False)
    loop.pass_time()
    assert not stopped  # no request so far
    made.request_began()
    made.request_ended()

    loop.pass_time()

    assert stopped


def test_process_that_nobody_asks_is_stopped_in_time(loop: Clockwork) -> None:
    """Without any request the idle time starts with the process."""
    stopped: list[str] = []
    watch(stopped, is_used=lambda: False)
    waited = 0.0
    while not stopped:
        waited += loop.timers[0][0]
        loop.pass_time()

    assert waited == IDLE_S
