"""What operators of the service see: log lines and metrics."""

from __future__ import annotations

import json
import logging
import sys

from fastapi.testclient import TestClient

from dstl_service.app import create_app
from dstl_service.logs import JsonFormatter
from dstl_service.settings import ServiceSettings
from storage.checksum import checksum64
from storage.memory_store import MemoryStore

PAYLOAD = b"x" * 100
APPEND = (
    "/v1/jobs/job/change-sets?operator=op&checkpoint_id=0&epoch=1&attempt=1&partition=0&sqn=0"
    f"&first_key_group=0&last_key_group=1&count=1&checksum={checksum64(PAYLOAD):016x}"
)


def test_log_line_carries_its_fields() -> None:
    """A record is one JSON line with what was given as extra, and with the traceback of an error."""
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


def test_metrics_count_what_happened() -> None:
    """Received sets, uploads, attempts, sizes and checkpoints are counted, by job where it matters."""
    with TestClient(create_app(ServiceSettings(storage="memory://metrics"), MemoryStore())) as client:
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
