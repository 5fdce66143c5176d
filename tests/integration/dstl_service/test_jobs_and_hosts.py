"""
One service with several jobs, and several hosts on one store: real processes on TCP, a file store.

A failure means that jobs see each other's sets, or that hosts write more than one object each per checkpoint.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import pytest

from backend_client.service.client import ServiceClient
from backend_client.service.log_writer import LogWriter
from dstl_service.repair.fsck import check_job
from dstl_service.repair.rebuild import rebuild_registry
from dstl_service.wire import ChangeSetRef, CheckpointRef, LogTarget
from storage.change_set import decode_change_set
from storage.clock import SystemClock, SystemIds
from storage.errors import LostChangesError, NotFoundError
from storage.key_groups import KeyGroupRange
from storage.object_store import ObjectStore
from storage.open import open_store
from tests.announced import wait_until_announced
from tools.servers.programs import free_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

GROUPS = KeyGroupRange(0, 127)
HOSTS = ("driver", "worker-1", "worker-2")


@contextmanager
def running(storage: str, host_id: str) -> Iterator[ServiceClient]:
    """Run a host's service that other hosts can call; yield a client of it."""
    address = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "dstl_service", "serve", "--storage", storage, "--host-id", host_id]
    command += ["--port", address.rsplit(":", 1)[1], "--advertise", address]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    client = ServiceClient(address, patience_s=60)
    try:
        wait_until_announced(client, host_id)
        yield client
    finally:
        client.close()
        process.kill()
        process.wait()


class Job:
    """A driver and its tasks; each partition's content is that of its sets."""

    def __init__(self, coordinator: ServiceClient, name: str) -> None:
        self.coordinator = coordinator
        self.name = name
        self.base: dict[str, Any] | None = None
        self.epoch = coordinator.post(f"/v1/jobs/{name}/epochs", {"owner": "test"})["epoch"]
        self.expected: dict[bytes, bytes] = {}

    @property
    def next_id(self) -> int:
        return self.base["id"] + 1 if self.base else 0

    def append(self, client: ServiceClient, partition: int, value: bytes) -> list[ChangeSetRef]:
        """Run a task on a host: every job has the same operator, attempts and keys."""
        target = LogTarget(self.name, "op", self.next_id, self.epoch, partition, partition, GROUPS)
        writer = LogWriter(client, target)
        changes = {bytes([0, partition, 0, 1]) + str(self.next_id).encode(): value}
        writer.append(dict(changes), preemptive=False)
        self.expected |= changes
        return writer.refs

    def complete(self, refs: list[ChangeSetRef], *, is_flushed: bool = True) -> dict[str, Any]:
        """Complete the next checkpoint."""
        body = {"epoch": self.epoch, "uid": f"{self.name}-{self.next_id}", "base": self.base, "operators": []}
        body["refs"] = [asdict(ref) for ref in refs]
        path = f"/v1/jobs/{self.name}/checkpoints/{self.next_id}"
        if is_flushed:
            self.coordinator.post(f"{path}/flush", body)
        answer: dict[str, Any] = self.coordinator.post(f"{path}/complete", body)
        self.base = answer["ref"]
        return answer

    def restored(self, client: ServiceClient, base: dict[str, Any] | None = None) -> dict[bytes, bytes | None]:
        """Return a table's restore from a host's service, by default at the newest checkpoint."""
        want = CheckpointRef(**(base or self.base or {})).to_text()
        with client.restore(self.name, "op", GROUPS, None, want) as frames:
            payloads = [payload for header, payload in frames if header["kind"] == "segment"]
        return dict(change for payload in payloads for change in decode_change_set(payload, "restore"))


def objects_of(store: ObjectStore, job: str) -> Counter[str]:
    """Return the number of segment objects that each host wrote for a job."""
    return Counter(info.key.split("/")[2] for info in store.list(f"{job}/segments/"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ObjectStore:
    """Return the store that all hosts share; each test has its own jobs."""
    return open_store(tmp_path_factory.mktemp("store").as_uri())


@pytest.fixture(scope="module")
def hosts(store: ObjectStore) -> Iterator[list[ServiceClient]]:
    """Return the services of three hosts."""
    with ExitStack() as stack:
        yield [stack.enter_context(running(store.url, host_id)) for host_id in HOSTS]


def test_jobs_of_one_service_stay_apart(hosts: list[ServiceClient]) -> None:
    """Two jobs with the same operators, partitions, attempts and keys never see or forget each other's sets."""
    client = hosts[0]
    one, two = Job(client, "one"), Job(client, "two")
    for _ in range(3):
        refs = two.append(client, 0, b"two")
        one.complete(one.append(client, 0, b"one"))  # forgets the sets received for `one`
        two.complete(refs)

    assert [job.restored(client) for job in (one, two)] == [one.expected, two.expected]
    assert [set(job.expected.values()) for job in (one, two)] == [{b"one"}, {b"two"}]
    with pytest.raises(NotFoundError):
        one.restored(client, two.base)
    with pytest.raises(LostChangesError):
        one.complete(two.append(client, 0, b"foreign"))


@pytest.mark.parametrize("workers", [[1, 2], [0, 1, 2], [2]])
def test_hosts_write_one_object_each(hosts: list[ServiceClient], store: ObjectStore, workers: list[int]) -> None:
    """I10: a checkpoint costs one object per host with tasks, wherever the object with its note is."""
    job = Job(hosts[0], f"job-{''.join(map(str, workers))}")
    for number in range(3):
        refs = [
            ref
            for partition in range(6)
            for ref in job.append(hosts[workers[partition % len(workers)]], partition, bytes([number, partition]))
        ]
        assert job.complete(refs, is_flushed=number != 1)["objects_written"] == len(workers) + 1

    assert objects_of(store, job.name) == {HOSTS[worker]: 3 for worker in workers}
    assert [job.restored(client) for client in hosts] == [job.expected] * 3
    for folder in ("job.json", "epochs/", "checkpoints/"):
        store.delete([info.key for info in store.list(f"{job.name}/{folder}")])
    report = rebuild_registry(store, job.name, SystemClock(), SystemIds(), write=True)
    assert (report.notes, report.checkpoint.split(".")[0]) == (3, "2")
    assert check_job(store, job.name).problems == []


def test_lost_host_costs_its_sets_only(hosts: list[ServiceClient], store: ObjectStore) -> None:
    """A host that dies with sets that are not durable fails the checkpoint; the repeated batch succeeds."""
    driver, worker, _ = hosts
    job = Job(driver, "job")
    with running(store.url, "worker-3") as dying:
        refs = [*job.append(worker, 0, b"a"), *job.append(dying, 1, b"b")]
    with pytest.raises(LostChangesError, match="cannot be reached"):
        job.complete(refs, is_flushed=False)
    driver.post("/v1/jobs/job/checkpoints/0/begin", {"epoch": job.epoch})
    job.complete([*job.append(worker, 0, b"a"), *job.append(worker, 1, b"b")])

    assert job.restored(driver) == job.expected
