"""Requests for a parallelism: from an administrator to the driver that begins a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dstl_service.checkpoints.requested_parallelism import LOOK_MS
from dstl_service.cli import main
from storage.memory_store import MemoryStore
from storage.open import open_store
from storage.testing import FakeClock, Fault, FaultKind, FaultyStore
from tests.unit.dstl_service.http_life import Life, service
from tests.waiting import wait_until


def begun(life: Life, checkpoint_id: int) -> Any:
    """Begin a checkpoint; return the requested parallelism in the answer."""
    answer = life.begin(checkpoint_id)
    assert answer.status_code == 200, answer.text
    return answer.json()["parallelism"]


def completed(life: Life) -> Life:
    """Take the job over and complete a checkpoint."""
    life.complete(0, None, life.append())
    return life


def request(life: Life, operator: str, parallelism: Any) -> Any:
    """Request a parallelism over HTTP; return the response."""
    return life.client.put(f"{life.path}/operators/{operator}/parallelism", json={"parallelism": parallelism})


def test_request_over_http_reaches_the_next_checkpoint() -> None:
    """The answer to every later begin has it; the driver of another epoch does not get it."""
    with service(MemoryStore()) as life:
        life.open()
        completed(life)
        assert begun(life, 1) == {}

        assert request(life, "op", 8).json() == {"op": 8}

        assert begun(life, 1) == begun(life, 2) == {"op": 8}
        life.open()
        assert begun(life, 1) == {}


def test_request_of_the_command_reaches_a_running_coordinator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`dstl rescale` writes to the storage; the coordinator looks there after `LOOK_MS`, a new one likewise."""
    url, clock = f"file://{tmp_path}", FakeClock()
    with service(open_store(url), clock) as life:
        life.open()
        completed(life)
        assert begun(life, 1) == {}
        assert main(["rescale", "--storage", url, "job", "op", "5"]) == 0
        assert "5 partitions requested" in capsys.readouterr().out
        assert begun(life, 1) == {}

        clock.advance(LOOK_MS)

        wait_until(lambda: begun(life, 1) == {"op": 5}, what="the request")
        epoch = life.epoch
    with service(open_store(url), clock) as life:
        life.epoch = epoch
        assert begun(life, 1) == {}
        clock.advance(LOOK_MS)
        wait_until(lambda: begun(life, 1) == {"op": 5}, what="the request")


def test_requests_of_the_same_number_differ() -> None:
    """A repeated request has another id, those of other operators keep theirs, and an earlier version's has none."""
    store, clock = MemoryStore(), FakeClock()

    def ids(life: Life) -> Any:
        return life.begin(1).json()["requests"]

    with service(store, clock) as life:
        life.open()
        completed(life)
        request(life, "op", 8)
        first = ids(life)
        assert first == ids(life)

        request(life, "op", 8)

        assert ids(life)["op"] not in ("", first["op"])
        assert begun(life, 1) == {"op": 8}
        store.put("job/hints/parallelism.json", json.dumps({"epoch": life.epoch, "operators": {"op": 3}}).encode())
        begun(life, 1)
        clock.advance(LOOK_MS)
        wait_until(lambda: begun(life, 1) == {"op": 3}, what="the request")
        assert ids(life) == {"op": ""}


def test_impossible_requests_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown operator and a parallelism out of bounds are refused, and nothing is requested."""
    url = f"file://{tmp_path}"
    with service(open_store(url)) as life:
        life.open()
        assert request(life, "op", 8).status_code == 404
        completed(life)

        assert request(life, "other", 8).status_code == 404
        assert request(life, "op", 129).json()["kind"] == "invalid_input"
        assert request(life, "op", 0).json()["kind"] == "invalid_input"
        assert main(["rescale", "--storage", url, "job", "op", "129"]) == 2
        assert "within 1..128" in capsys.readouterr().err
        assert main(["rescale", "--storage", url, "none", "op", "1"]) == 2
        assert begun(life, 1) == {}


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b'{"epoch": 1, "operators": {"op": 0}}',
        b'{"epoch": 1}',
        b'{"epoch": 1, "operators": {"op": "8"}, "requests": 1}',
    ],
)
def test_unreadable_request_counts_as_none(content: bytes) -> None:
    """Anybody who writes the store may write anything there; checkpoints go on."""
    store, clock = MemoryStore(), FakeClock()
    with service(store, clock) as life:
        life.open()
        completed(life)
        begun(life, 1)
        store.put("job/hints/parallelism.json", content)
        clock.advance(LOOK_MS)

        assert begun(life, 1) == {}
        assert request(life, "op", 3).json() == {"op": 3}


def test_store_that_fails_delays_no_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    """A look that fails is repeated later; the checkpoint does not wait for it."""
    store, clock = FaultyStore(MemoryStore()), FakeClock()
    with service(store, clock) as life:
        life.open()
        completed(life)
        request(life, "op", 3)
        store.inject(Fault("get", FaultKind.FAIL_BEFORE, "*/hints/parallelism.json"))
        clock.advance(LOOK_MS)

        assert begun(life, 1) == {"op": 3}

        wait_until(lambda: "were not read" in caplog.text, what="the warning")
        assert begun(life, 1) == {"op": 3}
