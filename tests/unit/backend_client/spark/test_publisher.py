"""The publisher's order, patience and back-pressure."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from backend_client.sinks.slot_publishing import Target
from backend_client.spark.output import publisher as publisher_module
from backend_client.spark.output.publisher import BacklogLimits, Publisher
from dstl_service.wire import SINK, CheckpointRef, OperatorInfo
from storage.errors import FencedError, InvalidInputError, UnavailableError
from tests.waiting import wait_until


def target(checkpoint_id: int) -> Target:
    return Target(CheckpointRef(checkpoint_id, 0, f"m{checkpoint_id}"))


class System:
    """Publishes when it may; counts calls."""

    def __init__(self) -> None:
        self.is_up = threading.Event()
        self.published: list[int] = []
        self.newest: list[int] = []
        self.known: list[int | None] = []
        self.first: list[int] = []
        self.refused = 0

    def __call__(self, wanted: Target) -> int:
        """Publish ten records, or fail as a Spark job does whose task raised an error of ours."""
        if not self.is_up.is_set():
            self.refused += 1
            raise RuntimeError(
                "Job aborted\nTraceback (most recent call last):\n  File\n"
                "storage.errors.UnavailableError: the broker is away: start it\n\n\tat org.apache.spark.X"
            )
        self.published.append(wanted.checkpoint.id)
        assert wanted.newest is not None
        self.newest.append(wanted.newest.id)
        self.known.append(wanted.published)
        self.first += [wanted.checkpoint.id] if wanted.is_first else []
        return 10


@pytest.fixture
def system() -> System:
    return System()


@pytest.fixture(autouse=True)
def _ended_threads() -> Iterator[None]:
    """Wait for the test's publishers: a warning of one would be taken for one of the next test."""
    before = threading.enumerate()
    yield
    join_all_but(before)


def join_all_but(before: Sequence[threading.Thread]) -> None:
    for thread in threading.enumerate():
        if thread not in before:
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture
def publisher(system: System) -> Iterator[Publisher]:
    made = Publisher("sink 'x'", system, BacklogLimits(2, 100, patience_s=0.2), None)
    yield made
    made.close()


def test_published_in_order(system: System, publisher: Publisher) -> None:
    """One after the other; the bound says how far."""
    system.is_up.set()
    for number in range(5):
        publisher.submit(target(number), 10)
    assert publisher.drain()
    assert system.published == [0, 1, 2, 3, 4]
    assert (publisher.published, publisher.backlog) == (4, (0, 0))
    assert system.first == [0]


def test_failures_are_repeated_and_block_only_at_the_bound(system: System, publisher: Publisher) -> None:
    """Nothing is lost; batches go on until two checkpoints wait, and again when the system is back."""
    publisher.submit(target(0), 10)
    publisher.wait_for_room()
    publisher.submit(target(1), 10)
    entered = threading.Event()

    def wait() -> None:
        publisher.wait_for_room()
        entered.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lambda: system.refused)
    assert not entered.is_set()
    with pytest.raises(UnavailableError, match=r"of 2 checkpoint\(s\) is not .* 'x' after 0.2 s: the broker"):
        publisher.drain()
    assert publisher.drain(0.01) is False
    system.is_up.set()
    waiting.join(30)
    assert entered.is_set()
    wait_until(lambda: system.published == [0, 1])


def test_a_new_reason_is_reported_at_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same reason is reported once a minute; another reason shows that the first one is fixed."""
    monkeypatch.setattr(publisher_module, "_FIRST_PAUSE_S", 0.01)
    reasons = iter(["the topic is full", "the topic is full", "the topic is gone"])

    def publish(_: Target) -> int:
        reason = next(reasons, None)
        if reason is not None:
            raise UnavailableError(reason)
        return 0

    publisher = Publisher("sink 'x'", publish, BacklogLimits(), None)
    publisher.submit(target(0), 1)
    assert publisher.drain(30)
    publisher.close()
    reported = [record.getMessage().rpartition(": ")[2] for record in caplog.records if record.levelname == "WARNING"]
    assert reported == ["the topic is full", "the topic is gone"]


def test_errors_of_other_kinds_say_why_too(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's sink may raise any error; Spark's text begins with lines that are the same for all."""
    monkeypatch.setattr(publisher_module, "_FIRST_PAUSE_S", 0.01)
    head = "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n"
    frame = '  File "sink.py", line 9, in publish\n    send(rows)\n'
    cause = f"{frame}OSError: reset by peer\n\nDuring handling of the above exception, another exception occurred:\n\n"
    texts = iter(
        [
            f"{head}{frame}ValueError: 413 too large\nask for less\n",
            f"{head}{cause}Traceback (most recent call last):\n{frame}requests.Timeout: no answer\n\n\tat org.x.Y",
            "Job aborted due to stage failure: executor 1 is gone\n  more",
            "",
        ]
    )

    def publish(_: Target) -> int:
        if (text := next(texts, None)) is not None:
            raise RuntimeError(text)
        return 0

    publisher = Publisher("sink 'x'", publish, BacklogLimits(), None)
    publisher.submit(target(0), 1)
    assert publisher.drain(30)
    publisher.close()
    reported = [record.getMessage().partition("retrying: ")[2] for record in caplog.records if record.levelno > 20]
    assert reported == [
        "ValueError: 413 too large",
        "requests.Timeout: no answer",
        "Job aborted due to stage failure: executor 1 is gone",
        "RuntimeError",
    ]


def test_a_publish_that_takes_long_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sink that hangs raises nothing: sink and checkpoint are named while it lasts, and no longer."""
    monkeypatch.setattr(publisher_module, "_REPORTED_EVERY_S", 0.05)
    goes_on = threading.Event()

    def publish(_: Target) -> int:
        assert goes_on.wait(30)
        return 0

    def reported() -> list[str]:
        return [record.getMessage() for record in caplog.records if "under way" in record.getMessage()]

    publisher = Publisher("sink 'x'", publish, BacklogLimits(), None)
    publisher.submit(target(7), 1)
    wait_until(lambda: len(reported()) >= 2)
    assert reported()[0].startswith("output of checkpoint 7 has been under way to sink 'x' for 0 s")
    goes_on.set()
    assert publisher.drain(30)
    publisher.close()
    wait_until(lambda: "dstl-publisher-watch" not in [thread.name for thread in threading.enumerate()])


def test_late_publish_knows_a_checkpoint_that_is_stored(system: System, publisher: Publisher) -> None:
    """A checkpoint that waits long may be subsumed meanwhile; each try reads the log of the newest one, if it must."""
    publisher.submit(target(0), 10)
    wait_until(lambda: system.refused)
    publisher.submit(target(1), 10)
    publisher.submit(target(2), 10)
    system.is_up.set()
    wait_until(lambda: publisher.backlog == (0, 0))
    assert (system.published, system.newest, system.known) == ([0, 1, 2], [2, 2, 2], [None, 0, 1])


def test_next_checkpoint_names_what_may_be_unpublished(system: System) -> None:
    """The newest published checkpoint, and all after it; after a restart those of before, too."""
    refs = [target(number).checkpoint for number in range(5)]
    info = OperatorInfo("x", 2, "S", {}, kind=SINK)
    known = replace(info, published=1, recent=refs[:3])
    made = Publisher("sink 'x'", system, BacklogLimits(2, 100, patience_s=0.2), known)
    made.submit(target(3), 10)
    assert made.described(info) == replace(info, published=1, recent=refs[1:4])
    made.submit(target(4), 10)
    system.is_up.set()
    wait_until(lambda: made.backlog == (0, 0))
    assert made.described(info) == replace(info, published=4, recent=refs[4:])
    made.close()


def test_batch_may_wait_until_all_is_published(system: System, publisher: Publisher) -> None:
    """Where keys move to other slots, what is older is published first, or the query is stopped."""
    publisher.submit(target(0), 10)
    publisher.stop_waiting()
    publisher.wait_for_room()
    with pytest.raises(UnavailableError, match="the query ends"):
        publisher.wait_for_room(until_empty=True)
    system.is_up.set()
    wait_until(lambda: publisher.backlog == (0, 0))
    publisher.wait_for_room(until_empty=True)


def test_bytes_bound_the_backlog(publisher: Publisher) -> None:
    """The last checkpoint may exceed the bound."""
    publisher.submit(target(0), 1000)
    publisher.stop_waiting()
    with pytest.raises(UnavailableError, match="the query ends while output for sink 'x' is unpublished"):
        publisher.wait_for_room()


def test_closed_publisher_stops(system: System, publisher: Publisher) -> None:
    """A query that has ended publishes no more; the next start does."""
    publisher.submit(target(0), 10)
    wait_until(lambda: system.refused)
    publisher.close()
    with pytest.raises(UnavailableError):
        publisher.drain()


def test_nobody_waits_for_a_publisher_that_is_closed() -> None:
    """The end of the query has waited as long as it may: a later `stop` says at once that output is left."""
    made = Publisher("sink 'x'", System(), BacklogLimits(patience_s=60), None)
    made.submit(target(0), 10)
    waiting = threading.Timer(0.05, made.close)
    waiting.start()
    began_s = time.monotonic()
    for timeout_s in (None, 30):
        with pytest.raises(UnavailableError, match=r"of 1 checkpoint\(s\) is not published"):
            made.drain(timeout_s)
    assert time.monotonic() - began_s < 20


def test_nobody_waits_for_a_spark_that_was_stopped(
    system: System, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No try can succeed: the end of the query says at once that output is left, and no batch waits."""
    monkeypatch.setattr(publisher_module, "_FIRST_PAUSE_S", 0.01)
    stopped = threading.Event()

    def is_stopped() -> bool:
        if system.refused == 1:
            raise OSError("no answer")
        return stopped.is_set()

    made = Publisher("sink 'x'", system, BacklogLimits(1, patience_s=10), None, is_spark_stopped=is_stopped)
    made.submit(target(0), 10)
    wait_until(lambda: system.refused > 2)
    stopped.set()
    try:
        for _ in range(2):
            with pytest.raises(UnavailableError, match=r"of 1 checkpoint\(s\) is not .* 'x': Spark was stopped before"):
                made.drain()
    finally:
        made.close()
    with pytest.raises(UnavailableError, match="the query ends"):
        made.wait_for_room()
    assert caplog.messages[-1].endswith("is left to the next start: Spark was stopped before")


def test_a_publish_without_an_end_is_given_up_when_the_query_has_ended(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tasks would keep their cores; while the query runs, it is waited for."""
    monkeypatch.setattr(publisher_module, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(publisher_module, "_GRACE_S", 0.01)
    before, began, given_up = threading.enumerate(), threading.Event(), threading.Event()

    def publish(_: Target) -> int:
        began.set()
        assert given_up.wait(30)
        raise RuntimeError("Job 7 cancelled")

    made = Publisher("sink 'x'", publish, BacklogLimits(patience_s=0.1), None, give_up=given_up.set)
    made.submit(target(0), 1)
    assert began.wait(30)
    with pytest.raises(UnavailableError, match="it takes long"):
        made.drain()
    assert not given_up.is_set()
    made.close()
    join_all_but(before)
    assert given_up.is_set()
    assert not [record for record in caplog.records if "retrying" in record.getMessage()]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"checkpoints": 0}, {"checkpoints": "8"}, {"size_bytes": -1}, {"size_bytes": True}),
        *({"patience_s": 0.0}, {"patience_s": None}, {"patience_s": float("nan")}, {"patience_s": float("inf")}),
    ],
)
def test_limits_are_checked(wrong: dict[str, Any]) -> None:
    """Bad input names the bound; the end of a query with an infinite one would fail, and release nothing."""
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        BacklogLimits(**wrong)


@pytest.mark.parametrize("is_other", [True, False])
@pytest.mark.parametrize("kind", ["FencedError", "ConflictError"])
def test_a_driver_that_was_overtaken_stops_publishing(kind: str, *, is_other: bool) -> None:
    """Each of its tries would fence its successor's; a publisher of its own that was fenced tries again."""
    tries: list[int] = []

    def fenced(wanted: Target) -> int:
        tries.append(wanted.checkpoint.id)
        if len(tries) < 3:
            raise RuntimeError(f"Job aborted\nstorage.errors.{kind}: slot 0 was opened by another publisher")
        return 1

    def check() -> None:
        if is_other:
            raise FencedError.taken_over("job", 1, 2)

    made = Publisher("sink 'x'", fenced, BacklogLimits(2, 100, patience_s=60), None, check)
    made.submit(target(0), 10)
    if is_other:
        with pytest.raises(FencedError, match="taken over by epoch 2"):
            made.drain()
        with pytest.raises(FencedError):
            made.wait_for_room()
        assert tries == [0]
    else:
        assert made.drain()
        assert tries == [0, 0, 0]
    made.close()
