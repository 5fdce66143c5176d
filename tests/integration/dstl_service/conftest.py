"""One S3 server with its proxies for all tests of this folder; each test has its own buckets, rules and services."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from backend_client.service.client import ServiceClient
from storage.clock import SystemIds
from tools.servers.faults.proxy import FaultProxy
from tools.servers.faults.toxiproxy import Toxiproxy
from tools.servers.s3_server import S3Server
from tools.servers.service.job_driver import JobDriver
from tools.servers.service.process import ServiceProcess

_IDS = SystemIds()

Serve = Callable[..., ServiceProcess]


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """Start a VersityGW."""
    with S3Server() as server:
        yield server


@pytest.fixture(scope="session")
def session_fault_proxy(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultProxy]:
    """Start a mitmproxy in front of it."""
    with FaultProxy(s3_server.endpoint_url, tmp_path_factory.mktemp("fault-proxy")) as proxy:
        yield proxy


@pytest.fixture
def fault_proxy(session_fault_proxy: FaultProxy) -> Iterator[FaultProxy]:
    """Return the fault proxy, without rules before and after the test."""
    session_fault_proxy.set_rules()
    yield session_fault_proxy
    session_fault_proxy.set_rules()


@pytest.fixture(scope="session")
def toxiproxy(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toxiproxy]:
    """Start a Toxiproxy in front of the S3 server."""
    with Toxiproxy(f"127.0.0.1:{s3_server.port}", tmp_path_factory.mktemp("toxiproxy")) as proxy:
        yield proxy


@pytest.fixture
def storage(s3_server: S3Server) -> str:
    """Return the URL of an empty storage."""
    bucket = f"b-{_IDS.unique_id()}"
    s3_server.create_bucket(bucket)
    return f"s3://{bucket}/some/prefix"


@pytest.fixture
def stored_keys(s3_server: S3Server, storage: str) -> Callable[[str], list[str]]:
    """Return a function that lists the objects in a folder of the storage as stored on the server's disk."""
    folder = Path(s3_server.data_dir, storage.removeprefix("s3://"))

    def keys(below: str) -> list[str]:
        return sorted(str(path.relative_to(folder)) for path in (folder / below).rglob("*") if path.is_file())

    return keys


@pytest.fixture
def serve(s3_server: S3Server, storage: str) -> Iterator[Serve]:
    """Return a function that starts services on the storage, by endpoint; they are stopped after the test."""
    with ExitStack() as stack:

        def start(endpoint_url: str, **settings: str) -> ServiceProcess:
            return stack.enter_context(ServiceProcess(storage, {**s3_server.env(endpoint_url), **settings}))

        yield start


@pytest.fixture
def open_job() -> Iterator[Callable[..., JobDriver]]:
    """Return a function that takes over a job at a service."""
    jobs: list[JobDriver] = []

    def start(service: ServiceProcess, name: str = "job", patience_s: float = 60.0) -> JobDriver:
        jobs.append(JobDriver(ServiceClient(service.address, patience_s=patience_s), name))
        return jobs[-1]

    yield start
    for job in jobs:
        job.client.close()
