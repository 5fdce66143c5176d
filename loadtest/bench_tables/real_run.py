"""
Checkpoints in real time, at a real S3 server behind the proxy that draws latencies: to hold the simulation against.

They have the sizes of the recording as they are: two subtasks on one host, each a quarter of a published one.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from random import Random

import boto3
from botocore.config import Config

from backend_client.service.client import ServiceClient
from dstl_service.wire import OperatorInfo
from loadtest.bench_tables.cells import Cell
from storage.key_groups import key_group_range
from tools.servers.faults.proxy import FaultProxy
from tools.servers.s3_server import S3Server
from tools.servers.service.job_driver import JobDriver
from tools.servers.service.process import ServiceProcess

_SEED = 5
_PAUSE_S = 0.2
_MANIFEST_BYTES = 16_384
_MAX_PARALLELISM = 128
_LOG_ONLY = {"DSTL_MATERIALIZATION_ENABLED": "false", "DSTL_COMPACTION_ENABLED": "false"}


def logged_ms(server: S3Server, proxy: FaultProxy, store: str, cell: Cell) -> list[float]:
    """Return how long a service takes from "all change sets are there" to "the checkpoint exists"."""
    proxy.set_store(store, _SEED)
    chance, took_ms = Random(_SEED), list[float]()
    subtasks = cell.layout.parallelism
    operator = OperatorInfo("op", subtasks, "{}", {})
    with ServiceProcess("s3://tables/real", {**server.env(proxy.endpoint_url), **_LOG_ONLY}) as service:
        job = JobDriver(ServiceClient(service.address, patience_s=60), max_parallelism=_MAX_PARALLELISM)
        for _ in range(cell.checkpoints):
            refs = []
            for partition in range(subtasks):
                payload = chance.randbytes(int(sum(cell.objects_of(chance))))
                groups = key_group_range(partition, subtasks, _MAX_PARALLELISM)
                refs.append(job.append(payload, partition=partition, key_groups=groups))
            begun_s = time.monotonic()
            job.complete(refs, operators=[operator])
            took_ms.append((time.monotonic() - begun_s) * 1000)
            time.sleep(_PAUSE_S)
        job.client.close()
    return took_ms


def plain_files_ms(server: S3Server, proxy: FaultProxy, store: str, cell: Cell) -> list[float]:
    """Return how long plain boto3 takes to put the files of all subtasks at once, and then what names them."""
    proxy.set_store(store, _SEED)
    chance, took_ms = Random(_SEED), list[float]()
    session = boto3.session.Session(server.access_key, server.secret_key, region_name=server.region)
    config = Config(max_pool_connections=64, retries={"total_max_attempts": 1}, read_timeout=60)
    client = session.client("s3", endpoint_url=proxy.endpoint_url, config=config)
    noise = chance.randbytes(1 << 24)

    def put(name: str, size_bytes: int) -> None:
        body = (noise * (size_bytes // len(noise) + 1))[:size_bytes]
        client.put_object(Bucket="tables", Key=f"plain/{name}", Body=body)

    with ThreadPoolExecutor(64) as pool:
        for number in range(cell.checkpoints):
            sizes = [int(size) for _ in range(cell.layout.parallelism) for size in cell.objects_of(chance)]
            begun_s = time.monotonic()
            for future in [pool.submit(put, f"{number}-{place}", size) for place, size in enumerate(sizes)]:
                future.result()
            put(f"{number}-manifest", _MANIFEST_BYTES)
            took_ms.append((time.monotonic() - begun_s) * 1000)
            time.sleep(_PAUSE_S)
    client.close()
    return took_ms
