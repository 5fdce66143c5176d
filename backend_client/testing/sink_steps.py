"""
Kills and suspends publishers at steps: named ones, and any of their own after they have read their records.

A step of their own is the end of a call within `publish`, or until the marker is read, and has a number. Of calls from
one place, such as a loop, the first and the last one count: a defect between two calls lasts as long as a step, however
many there are. A process that has imported everything forks once for each publisher.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

import pyarrow as pa

from backend_client.sinks.protocol import Marker, Sink, Slot

_TIMEOUT_S = 120.0


class Step(NamedTuple):
    """A step of a publisher's own: its number, and how many calls below `publish`, or the kit's own call, it is."""

    number: int
    depth: int


@dataclass(frozen=True, slots=True)
class Publishing:
    """
    The work of a publisher.

    Args:
        sink: The sink.
        slot: The slot.
        batches: The records.
        marker: The marker. Nothing is published if that is found.
        is_opening: Whether the publisher's own steps are those until the marker is read.
    """

    sink: Sink
    slot: Slot
    batches: Sequence[pa.RecordBatch]
    marker: Marker
    is_opening: bool = False


class SteppedPublishers:
    """
    Processes that publish, and stop at a step; there are no others after one that did not end.

    The process that forks them starts with the first one: its imports take longer than most histories.
    """

    _is_stuck = False
    _process: SpawnProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._answers.close()
            self._process.join(_TIMEOUT_S)

    def steps(self, what: Publishing) -> list[Step]:
        """Publish; return the steps, or raise `RuntimeError` with the text of the error that the publisher raised."""
        found = self._ask(what, 0, 0)
        if isinstance(found, str):
            raise RuntimeError(f"a publisher in a process of its own failed: {found}")  # noqa: TRY004 - no wrong type
        return list(found)

    def killed(self, what: Publishing, step: int | str) -> bool:
        """Publish until a step, at which the publisher is killed; return whether it got there."""
        return bool(self._ask(what, step, signal.SIGKILL))

    def suspended(self, what: Publishing, step: int | str) -> int:
        """Publish until a step, at which the publisher stands still; return its process, 0 if it has ended before."""
        return int(self._ask(what, step, signal.SIGSTOP))

    def resumed(self, process: int) -> None:
        """Let a publisher go on to its end."""
        if process:
            os.kill(process, signal.SIGCONT)
            self._answer()

    def _start(self) -> SpawnProcess:
        context = multiprocessing.get_context("spawn")
        self._answers, other = context.Pipe()
        process = context.Process(target=_serve, args=(other,))
        process.start()
        other.close()
        return process

    def _ask(self, what: Publishing, step: int | str, sent: int) -> Any:
        self._process = self._process or self._start()
        self._answers.send((what, step, sent))
        return self._answer()

    def _answer(self) -> Any:
        self._is_stuck = self._is_stuck or not self._answers.poll(_TIMEOUT_S)
        if self._is_stuck:
            raise TimeoutError("a publisher did not end")
        return self._answers.recv()


def chosen(steps: Sequence[Step], count: int) -> list[int]:
    """Return the numbers of at most `count` steps, in order: those nearest to `publish`, and some of the next ones."""
    near: list[Step] = []
    for depth in sorted({step.depth for step in steps}):
        of_depth = [step for step in steps if step.depth == depth]
        left = min(count - len(near), len(of_depth))
        near += [of_depth[number * (len(of_depth) - 1) // max(left - 1, 1)] for number in range(left)]
    return sorted(step.number for step in near)


def _serve(answers: Connection) -> None:
    """Fork a publisher for each request."""
    while True:
        try:
            what, step, sent = answers.recv()
        except EOFError:
            return
        child = os.fork()
        if child == 0:
            code = 1
            try:
                steps = _publish(what, step, sent)
                if not sent:
                    answers.send(steps)
                code = 0
            except Exception as error:  # noqa: BLE001 - the sink is the user's
                if not sent:
                    answers.send(f"{type(error).__name__}: {error}")
                    code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            answers.send(child)
            _, status = os.waitpid(child, 0)
        if sent or status:
            answers.send(int(os.WIFSIGNALED(status)))


def _publish(what: Publishing, stop_at: int | str, sent: int) -> list[Step]:
    """Publish, and send a signal to this process at a step; return the publisher's own steps."""
    steps = 0
    first: dict[Any, Step] = {}
    last: dict[Any, Step] = {}

    def reach(name: str) -> None:
        if name == stop_at:
            os.kill(os.getpid(), sent)

    def count(frame: FrameType, event: str, called: Any) -> None:
        nonlocal steps
        if event not in ("return", "c_return"):
            return
        steps += 1
        if steps == stop_at:
            os.kill(os.getpid(), sent)
        if not sent and (caller := frame if event == "c_return" else frame.f_back) is not None:
            place = (caller.f_code, caller.f_lineno, called.__name__ if event == "c_return" else frame.f_code)
            if place not in first:
                first[place] = Step(steps, len(list(_frames(caller, outer))))
            last[place] = first[place]._replace(number=steps)

    def records() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(what.batches):
            if number == 1:
                reach("between records")
            yield batch
        reach("all records read")
        if not what.is_opening:
            sys.setprofile(count)

    outer: Any = _publish.__code__
    if what.is_opening:
        sys.setprofile(count)
    publisher = what.sink.open(what.slot)
    is_published = publisher.last_published() == what.marker
    sys.setprofile(None)
    if not what.is_opening:
        outer = getattr(type(publisher).publish, "__code__", None)
    reach("opened")
    try:
        if not is_published:
            publisher.publish(records(), what.marker)
    finally:
        sys.setprofile(None)
    reach("published")
    publisher.close()
    return sorted({*first.values(), *last.values()})


def _frames(frame: FrameType | None, until: Any) -> Iterator[FrameType]:
    """Yield the frames from one up to the one of a code, without that."""
    while frame is not None and frame.f_code is not until:
        yield frame
        frame = frame.f_back
