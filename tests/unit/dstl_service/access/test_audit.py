"""The audit record keeps who did what to which job."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from threading import Event

import pytest

from dstl_service.access import audit
from dstl_service.access.audit import AuditTrail, this_user
from dstl_service.cli import main
from dstl_service.http.acts import RecordWriter
from storage.memory_store import MemoryStore
from storage.object_store import ObjectStore
from storage.open import open_store
from storage.testing import FakeClock, FakeIds, Fault, FaultKind, FaultyStore
from tests.unit.dstl_service.http_life import service
from tests.waiting import wait_until

GRANTS = 'tokens = [{ name = "night shift", role = "operator", token = "operator-token" }]'


def trail_of(store: ObjectStore) -> AuditTrail:
    """Return the entries of a store's record."""
    return AuditTrail(store, FakeClock(), FakeIds())


def test_requests_are_recorded_with_who_sent_them(tmp_path: Path) -> None:
    """Acts that change the fate of a job are recorded with the token's name; refused and dry requests are not."""
    store = MemoryStore()
    (tmp_path / "access.toml").write_text(GRANTS, encoding="utf-8")
    with service(store, token="all-rights", access_file=tmp_path / "access.toml") as life:
        life.client.headers["authorization"] = "Bearer all-rights"
        life.open()
        life.complete(0, None, life.append())
        life.client.headers["authorization"] = "Bearer operator-token"
        assert life.client.put(f"{life.path}/savepoints/kept", json={}).status_code == 200
        assert life.client.put(f"{life.path}/savepoints/none", json={"checkpoint_id": 99}).status_code == 404
        assert life.client.post(f"{life.path}/epochs", json={"owner": "x"}).status_code == 403
        padded = f"{life.path}/checkpoints/{1:031}/abort"
        assert life.client.post(padded, json={"epoch": life.epoch}).status_code == 204
        assert life.client.delete(f"{life.path}/savepoints/kept").status_code == 204
        for query in ("", "?dry_run=true", "?dry_run=false"):
            assert life.client.post(f"{life.path}/garbage-collection{query}").status_code == 200
        wait_until(lambda: len(list(store.list("@audit/"))) == 5, what="the record")

    assert [(entry.who, entry.act, entry.facts) for entry in trail_of(store).entries("job", pytest.fail)] == [
        ("token", "open", {}),
        ("night shift", "create savepoint", {"savepoint": "kept"}),
        ("night shift", "abort", {"checkpoint_id": "1"}),
        ("night shift", "delete savepoint", {"savepoint": "kept"}),
        ("night shift", "collect garbage", {}),
    ]


def test_failing_store_does_not_stop_anybody(caplog: pytest.LogCaptureFixture) -> None:
    """An entry that cannot be stored is logged, and the log says that it is only there."""
    faulty = FaultyStore(MemoryStore())
    faulty.inject(Fault("put", FaultKind.FAIL_BEFORE))
    trail = trail_of(faulty)
    with caplog.at_level(logging.INFO):
        trail.record("ann", "rewind", "job", target="1.0.x")

    assert trail.failures == 1
    assert [record.message for record in caplog.records] == ["audit", "an act is recorded only in the log"]
    assert vars(caplog.records[0])["who"] == "ann"


def test_old_entries_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest entries of each job are kept, however often it was started."""
    monkeypatch.setattr(audit, "KEPT_MAX", 3)
    trail = trail_of(MemoryStore())
    for number in range(5):
        trail.record("ann", "open", "job", number=str(number))
    trail.record("ann", "open", "other")

    assert [entry.facts["number"] for entry in trail.entries("job", pytest.fail)] == ["2", "3", "4"]
    assert len(list(trail.entries("other", pytest.fail))) == 1


def test_old_entries_of_commands_go_wherever_they_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """I12: a command that runs once a day in a container of its own leaves no entry for ever."""
    monkeypatch.setattr(audit, "KEPT_MAX", 3)
    trail = trail_of(MemoryStore())
    for number in range(5):
        monkeypatch.setattr("socket.gethostname", partial(str, f"pod-{number}"))
        trail.record_command("collect garbage", "job")

    hosts = [entry.who.partition("@")[2] for entry in trail.entries("job", pytest.fail)]
    assert hosts == ["pod-2", "pod-3", "pod-4"]


def test_often_repeated_act_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """C15: a caller that may only start a job cannot push other callers' acts out of the record."""
    monkeypatch.setattr(audit, "KEPT_MAX", 3)
    trail = trail_of(MemoryStore())
    for act in ("delete savepoint", "rewind"):
        trail.record("ann", act, "job")
    for _ in range(10):
        trail.record("mallory", "open", "job")
        trail.record("mallory", "abort", "job")

    trail.record("ann", "open", "job")

    acts = [entry.act for entry in trail.entries("job", pytest.fail)]
    assert acts == ["delete savepoint", "rewind", *["open", "abort"] * 3, "open"]


def test_waiting_entries_of_one_job_leave_room_for_others() -> None:
    """C15: while the store is slow, one job's acts do not keep other jobs' acts from being recorded."""
    go_on = Event()
    recorded: list[str] = []

    class SlowTrail(AuditTrail):
        def record(self, who: str, act: str, job: str, **facts: str) -> None:
            go_on.wait(30)
            recorded.append(job)

    writer = RecordWriter(SlowTrail(MemoryStore(), FakeClock(), FakeIds()))
    for _ in range(2_000):
        writer.write("mallory", "open", "loud", {})
    writer.write("ann", "rewind", "quiet", {})
    go_on.set()
    writer.close()
    wait_until(lambda: "quiet" in recorded, what="the record of the other job")

    assert 0 < recorded.count("loud") < 2_000


@pytest.mark.parametrize(
    "damage",
    [
        b"{",
        b"[]",
        b'{"at_ms": 1}',
        b'{"at_ms": "x", "who": "w", "act": "a", "job": "j"}',
        b'{"at_ms": 1e300, "who": "w", "act": "a", "job": "j"}',
        b'{"at_ms": 1, "who": "w", "act": "a", "job": "j", "facts": 1}',
    ],
)
def test_damaged_entry_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: bytes) -> None:
    """I10: an unreadable entry is reported by name; the command prints the others and fails."""
    store = open_store(f"file://{tmp_path}")
    trail = trail_of(store)
    trail.record("ann", "open", "job")
    store.put("@audit/job/1.json", damage)
    trail.record("bob", "rewind", "job")

    assert main(["audit", "--storage", store.url, "job"]) == 1
    out, err = capsys.readouterr()
    assert [line.split("  ")[1] for line in out.splitlines()] == ["ann", "bob"]
    assert "audit entry @audit/job/1.json is damaged" in err


def test_user_of_a_command_is_named() -> None:
    """A user who works on a storage without a service is recorded by user name and host."""
    assert "@" in this_user()


def test_no_spelling_of_a_path_avoids_the_record() -> None:
    """C12: no path that the routes accept and the record misses can take a job over, or do anything else to it."""
    with service(MemoryStore()) as life:
        answer = life.client.post("/v1/jobs/job/epochs%0A", json={"owner": "x"})

        assert answer.status_code == 400
        assert life.client.get(life.path).status_code == 404
