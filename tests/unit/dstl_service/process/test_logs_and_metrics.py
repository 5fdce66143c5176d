"""The service as its operators see it: log lines and metrics."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from dstl_service.app import create_app
from dstl_service.process.logs import JsonFormatter, LogLimiter
from dstl_service.settings import ServiceSettings
from dstl_service.uploads.settings import UploadSettings
from dstl_service.wire import BatchFigures
from storage.checksum import checksum64
from storage.memory_store import MemoryStore
from storage.testing import FakeClock, Fault, FaultKind, FaultyStore
from tests.unit.dstl_service.http_life import Life, samples, service

PAYLOAD = b"x" * 100
SEGMENTS = "*/segments/*"
APPEND = (
    "/v1/jobs/job/change-sets?operator=op&checkpoint_id=0&epoch=1&attempt=1&partition=0&sqn=0"
    f"&first_key_group=0&last_key_group=1&count=1&checksum={checksum64(PAYLOAD):016x}"
)


def test_log_line_carries_its_fields() -> None:
    """A record is one JSON line with its extra fields, and with the traceback of an error."""
    try:
        raise ValueError("broken")
    except ValueError:
        error = sys.exc_info()
    record = logging.LogRecord("dstl_service", logging.ERROR, "", 0, "upload %s", ("failed",), error)
    record.__dict__.update(job="orders", checkpoint_id=7)

    line = json.loads(JsonFormatter().format(record))

    assert (line["event"], line["job"], line["checkpoint_id"], line["level"]) == ("upload failed", "orders", 7, "ERROR")
    assert "ValueError: broken" in line["exception"]
    assert "args" not in line


def events(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    """Return the log lines of one event as they are written."""
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    return [line for line in lines if line["event"] == event]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Capture everything that the service logs."""
    caplog.set_level(logging.DEBUG, "dstl_service")
    return caplog


def test_life_of_checkpoint_is_logged(lines: pytest.LogCaptureFixture) -> None:
    """The lines about opening, uploading and completing name job, checkpoint, epoch and attempts."""
    with service(MemoryStore()) as life:
        life.open()
        life.complete(0, None, life.append(attempt=7), life.append(b"two", attempt=7, sqn=1))

    assert events(lines, "job opened")[0]["epoch"] == 1
    upload = events(lines, "change sets uploaded")[0]
    assert (upload["job"], upload["checkpoint_id"], upload["epoch"], upload["attempts"]) == ("job", 0, 1, [7])
    assert (upload["change_sets"], upload["upload_attempts"], upload["level"]) == (2, 1, "DEBUG")
    completed = events(lines, "checkpoint completed")[0]
    assert (completed["job"], completed["checkpoint_id"], completed["epoch"]) == ("job", 0, 1)


def test_failed_upload_and_refused_persist_are_logged(lines: pytest.LogCaptureFixture) -> None:
    """A failed upload names its jobs; so does the request that failed because of it."""
    fault = Fault("put", FaultKind.FAIL_BEFORE, "*/segments/*", times=2)
    with service(FaultyStore(MemoryStore(), fault)) as life:
        life.open()
        assert life.persist(life.append(attempt=7)).status_code == 503

    failed = events(lines, "upload failed")[0]
    assert (failed["job"], failed["checkpoint_id"], failed["epoch"], failed["attempts"]) == ("job", 0, 1, [7])
    refused = events(lines, "request refused")[0]
    assert (refused["job"], refused["path"], refused["kind"]) == ("job", "/v1/jobs/job/persist", "unavailable")
    assert refused["level"] == "WARNING"


def test_upload_that_needed_attempts_is_logged(lines: pytest.LogCaptureFixture) -> None:
    """An upload with more than one attempt is logged without debug logging."""
    fault = Fault("put", FaultKind.FAIL_BEFORE, "*/segments/*")
    with service(FaultyStore(MemoryStore(), fault)) as life:
        life.open()
        assert life.persist(life.append()).status_code == 200

    line = events(lines, "change sets uploaded")[0]
    assert (line["upload_attempts"], line["level"]) == (2, "INFO")


@pytest.mark.parametrize("more", [{}, {"later": 1}], ids=["short way", "long way"])
def test_fenced_append_is_logged(more: dict[str, int], lines: pytest.LogCaptureFixture) -> None:
    """A zombie's change set is refused with a line that names its job, checkpoint, epoch and attempt."""
    with service(MemoryStore()) as life:
        life.open()
        life.open()
        assert life.append_raw(b"payload", epoch=1, attempt=7, checkpoint_id=3, **more).status_code == 409

    line = events(lines, "request refused")[0]
    assert (line["kind"], line["job"], line["checkpoint_id"], line["epoch"]) == ("fenced", "job", 3, 1)
    assert (line["attempt"], line["level"]) == (7, "WARNING")


def test_newer_epoch_is_logged(lines: pytest.LogCaptureFixture) -> None:
    """A host that learns of a newer driver from its tasks says so."""
    store = MemoryStore()
    with service(store) as life:
        life.open()
        with service(store) as coordinator:
            coordinator.open()
        life.append(epoch=2)

    line = events(lines, "newer epoch")[-1]
    assert (line["job"], line["epoch"], line["older_epoch"]) == ("job", 2, 1)


def test_back_pressure_is_one_line_a_second(lines: pytest.LogCaptureFixture) -> None:
    """Thousands of refused change sets produce one line per second, which names one of them."""
    store = FaultyStore(MemoryStore(), Fault("put", FaultKind.DELAY, "*/segments/*", times=99))
    try:
        with service(store) as life:
            life.open()
            life.append(b"x" * 1500)
            for sqn in range(1, 4):
                assert life.append_raw(b"x" * 1500, sqn=sqn, attempt=7).status_code == 429
    finally:
        store.heal()

    found = events(lines, "request refused")
    assert len(found) >= 1
    assert (found[0]["job"], found[0]["attempt"], found[0]["kind"]) == ("job", 7, "overloaded")


def test_throttle_counts_what_it_holds_back() -> None:
    """The first event is logged at once; all events of an interval share the next line."""
    clock = FakeClock()
    limiter = LogLimiter(clock)

    assert [limiter.count() for _ in range(4)] == [1, 0, 0, 0]
    clock.advance(1_000)
    assert [limiter.count(), limiter.count()] == [4, 0]


def test_strangers_do_not_fill_the_log(lines: pytest.LogCaptureFixture) -> None:
    """Requests without the token are counted in one line per second, which contains no data that they sent."""
    with service(MemoryStore(), token="secret") as life:
        for _ in range(20):
            headers = {"authorization": "Bearer guessed"}
            assert life.client.get("/v1/info?key=guessed", headers=headers).status_code == 401

    found = events(lines, "request without a valid token")
    assert 1 <= len(found) < 20
    assert found[0]["path"] == "/v1/info"
    assert "guessed" not in json.dumps(found)


def test_metrics_count_what_happened() -> None:
    """Received sets, uploads, attempts, sizes and checkpoints are counted, by job where it matters."""
    with TestClient(create_app(ServiceSettings("memory://metrics"), MemoryStore()), "http://localhost") as client:
        client.post("/v1/jobs/job/epochs", json={"owner": "test"})
        ref = client.post(APPEND, content=PAYLOAD).json()
        body = {"epoch": 1, "uid": "u", "base": None, "refs": [ref], "operators": []}
        assert client.post("/v1/jobs/job/checkpoints/0/complete", json=body).status_code == 200
        text = client.get("/metrics").text

    for line in (
        'dstl_change_sets_total{job="job"} 1.0',
        'dstl_change_set_bytes_total{job="job"} 100.0',
        'dstl_uploads_total{job="job"} 1.0',
        "dstl_upload_attempts_sum 1.0",
        "dstl_batch_change_sets_sum 1.0",
        'dstl_checkpoints_completed_total{job="job"} 1.0',
        "dstl_in_flight_bytes 0.0",
    ):
        assert line in text.splitlines()


def test_metrics_of_uploads_have_their_meanings() -> None:
    """Uploads, failures, attempts, losers, winners, sets per batch and the queue are counted as they happen."""
    store = FaultyStore(MemoryStore(), Fault("put", FaultKind.FAIL_BEFORE, SEGMENTS, times=4))
    with service(store, upload=UploadSettings(timeout_ms=10_000, attempts_max=3, delay_after_error_ms=1)) as life:
        life.open()
        refs = [life.append(b"x" * 100, partition=partition, attempt=partition) for partition in range(3)]
        queued = samples(life)
        assert life.persist(*refs).status_code == 503
        failed = samples(life)
        assert life.persist(*refs).status_code == 200
        stored = samples(life)

    assert (queued["dstl_queued_change_sets"], queued["dstl_in_flight_bytes"]) == (3, 300)
    assert (failed["dstl_queued_change_sets"], failed["dstl_in_flight_bytes"]) == (3, 300)
    assert (failed['dstl_uploads_total{job="job"}'], failed['dstl_upload_failures_total{job="job"}']) == (1, 1)
    assert failed['dstl_upload_loser_attempts_total{job="job"}'] == 3
    assert (stored["dstl_queued_change_sets"], stored["dstl_in_flight_bytes"]) == (0, 0)
    assert (stored['dstl_uploads_total{job="job"}'], stored['dstl_upload_failures_total{job="job"}']) == (2, 1)
    assert (stored["dstl_upload_attempts_sum"], stored["dstl_upload_winning_attempt_sum"]) == (2, 2)
    assert stored['dstl_upload_loser_attempts_total{job="job"}'] == 4
    assert stored["dstl_batch_change_sets_sum"] == 6
    assert stored["dstl_upload_bytes_sum"] > 300
    assert (stored["dstl_upload_seconds_count"], stored["dstl_upload_attempts_running"]) == (1, 0)


def test_batches_are_counted_by_job() -> None:
    """A driver's figures of its batches are in the coordinator's metrics; an unknown job is refused."""
    figures = dict.fromkeys((field.name for field in fields(BatchFigures)), 250) | {"tries": 3}
    with service(MemoryStore()) as life:
        life.open()
        for _ in range(2):
            assert life.client.post("/v1/jobs/job/batches", json=figures).status_code == 204
        assert life.client.post("/v1/jobs/stranger/batches", json=figures).status_code == 404
        assert life.client.post("/v1/jobs/job/batches", json=figures | {"rows": -1}).status_code == 400
        text = life.client.get("/metrics").text

    assert 'dstl_batches_total{job="job"} 2.0' in text
    assert 'dstl_batches_repeated_total{job="job"} 4.0' in text
    assert 'dstl_batch_rows_total{job="job"} 500.0' in text
    assert 'dstl_batch_seconds_sum{job="job",phase="upload"} 0.5' in text
    assert 'dstl_batch_table_bytes{job="job"} 250.0' in text
    assert 'dstl_unpublished_checkpoints{job="job"} 250.0' in text
    assert "stranger" not in text


def test_wrong_requests_are_one_short_line_a_second(lines: pytest.LogCaptureFixture) -> None:
    """C10: invalid requests are not logged one by one, nor with text of a length that the client chose."""
    with service(MemoryStore()) as life:
        life.open()
        for sqn in range(20):
            life.append_raw(sqn=sqn, epoch=99, operator="x" * 128)
        life.client.get(f"/v1/jobs/{'j' * 128}/checkpoints")

    found = events(lines, "request refused")
    assert len(found) <= 2
    assert all(len(str(line)) < 3000 for line in found)


def test_refusals_of_a_job_are_one_line_a_second(lines: pytest.LogCaptureFixture) -> None:
    """C26: a writer whose requests are refused at any rate fills no log, and hides no other job's refusal."""
    with service(MemoryStore(), FakeClock()) as life:
        other = Life(life.client, "other")
        for job in (life, other):
            job.open()
            job.open()
        for _ in range(20):
            assert life.complete_raw(5, None).status_code == 409
            assert life.append_raw(epoch=1).status_code == 409
            assert life.append_raw(checksum="0" * 16).status_code == 422
        assert other.append_raw(epoch=1).status_code == 409

    found = [(line["job"], line["kind"]) for line in events(lines, "request refused")]
    assert found == [("job", "conflict"), ("job", "fenced"), ("job", "corrupt_data"), ("other", "fenced")]


def test_requests_beyond_a_role_are_one_line_a_second(lines: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """C10: a caller with few rights cannot fill the log; the line tells it although invalid requests have theirs."""
    access = tmp_path / "access.toml"
    access.write_text('tokens = [{name = "monitor", role = "reader", token = "reading"}]', encoding="utf-8")
    access.chmod(0o600)
    with service(MemoryStore(), access_file=access) as life:
        life.client.headers["authorization"] = "Bearer reading"
        life.client.get("/v1/jobs/nothing/checkpoints")
        for _ in range(50):
            assert life.client.post("/v1/jobs/job/epochs", json={"owner": "me"}).status_code == 403

    found = [line for line in events(lines, "request refused") if line["kind"] == "unauthorized"]
    assert 1 <= len(found) <= 5
    assert "monitor has the role reader" in found[0]["error"]
