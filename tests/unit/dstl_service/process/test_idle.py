"""When a process that nobody needs stops: in the time of an event loop that this module moves by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dstl_service.process.idle import IdleWatch

IDLE_S = 30


class Clockwork:
    """The part of an event loop that the watch uses."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay_s: float, function: Callable[[], None]) -> Any:
        """Keep the function until `pass_time`."""
        self.timers.append((delay_s, function))
        return None

    def pass_time(self) -> None:
        """Let the time of the watch be over."""
        (_, function), self.timers = self.timers[0], []
        function()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Clockwork:
    """Return the loop in which watches of the test live."""
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
    """A request moves the end away by one time; without another one the process stops."""
    stopped: list[str] = []
    made = watch(stopped)
    made.request_began()
    made.request_ended()

    loop.pass_time()
    assert not stopped
    loop.pass_time()
    assert stopped


def test_running_request_keeps_the_process(loop: Clockwork) -> None:
    """A restore that streams for hours is in use all the time; the count begins at its end."""
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
    """A snapshot that is being stored is not broken off because nobody asks anything."""
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
    """With wrong credentials each request fails; the next process has the environment of who starts it."""
    stopped: list[str] = []
    made = watch(stopped, is_used=lambda: False)
    loop.pass_time()
    assert not stopped  # nobody has asked yet
    made.request_began()
    made.request_ended()

    loop.pass_time()

    assert stopped


def test_process_that_nobody_asks_is_stopped_in_time(loop: Clockwork) -> None:
    """Without any request the idle time counts."""
    stopped: list[str] = []
    watch(stopped, is_used=lambda: False)
    waited = 0.0
    while not stopped:
        waited += loop.timers[0][0]
        loop.pass_time()

    assert waited == IDLE_S
