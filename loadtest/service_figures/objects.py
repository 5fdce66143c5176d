"""
Figure 5: number of objects per checkpoint, counted at the S3 server at the end.

The tasks of a host end at different times within the second; their change sets share objects all the same. Everything
in the bucket counts: segment objects, manifests, and the job's other objects.
"""

from __future__ import annotations

import os
import time
import uuid

from backend_client.service.client import ServiceClient
from dstl_service.wire import OperatorInfo
from storage.key_groups import KeyGroupRange
from tools.reporting.figures import Figure, Goal, percentile
from tools.servers.s3_server import S3Server
from tools.servers.service.job_driver import JobDriver
from tools.servers.service.process import ServiceProcess

BUCKET = "objects"
JOB = "objects"
PARTITIONS = 64
SET_BYTES = 4 * 1024
OBJECTS_PER_CHECKPOINT_MAX = 2.2
_OPERATOR = OperatorInfo("op", PARTITIONS, "{}", {})


def measure(*, short: bool) -> list[Figure]:
    """Run checkpoints at a fixed interval, then list the bucket."""
    checkpoints, interval_s = (60, 0.2) if short else (60, 1.0)
    with S3Server() as server:
        server.create_bucket(BUCKET)
        with ServiceProcess(f"s3://{BUCKET}", server.env()) as service:
            complete_ms = run_checkpoints(service.address, checkpoints, interval_s)
        # After the end of the service, which might have written more until then.
        objects = count_objects(server)
    return [
        Figure(
            f"{PARTITIONS} partitions: objects per checkpoint",
            objects / checkpoints,
            "objects",
            Goal("<=", OBJECTS_PER_CHECKPOINT_MAX),
        ),
        Figure(f"{PARTITIONS} partitions: objects in the bucket after {checkpoints} checkpoints", objects, "objects"),
        Figure(f"{PARTITIONS} partitions: complete, median", percentile(complete_ms, 50), "ms"),
        Figure(f"{PARTITIONS} partitions: complete, p99", percentile(complete_ms, 99), "ms"),
    ]


def run_checkpoints(address: str, checkpoints: int, interval_s: float) -> list[float]:
    """Run a driver and its tasks; return each checkpoint's time from its request to its manifest, in ms."""
    job = JobDriver(ServiceClient(address), JOB)
    complete_ms = []
    start_s = time.monotonic()
    for checkpoint_id in range(checkpoints):
        job.begin()
        refs = []
        for partition in range(PARTITIONS):
            # Appends take the first half of the interval, the checkpoint the second.
            _wait_until(start_s + interval_s * (checkpoint_id + partition / PARTITIONS / 2))
            groups = KeyGroupRange(2 * partition, 2 * partition + 1)
            payload = os.urandom(SET_BYTES)
            attempt = checkpoint_id * PARTITIONS
            refs.append(job.append(payload, partition=partition, attempt=attempt, key_groups=groups))
        begun_s = time.monotonic()
        job.complete(refs, uid=uuid.uuid4().hex, operators=[_OPERATOR], query_id="query", offsets="offsets")
        complete_ms.append(1000 * (time.monotonic() - begun_s))
    job.client.close()
    return complete_ms


def count_objects(server: S3Server) -> int:
    """Return how many objects of any kind the server lists."""
    client = server.client()
    try:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return sum(page["KeyCount"] for page in pages)
    finally:
        client.close()


def _wait_until(time_s: float) -> None:
    time.sleep(max(0.0, time_s - time.monotonic()))
