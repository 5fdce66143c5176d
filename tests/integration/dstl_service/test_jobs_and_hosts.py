"""
One service with several jobs, and several hosts on one store: real processes on TCP, a file store.

A failure means that jobs see each other's sets, or that hosts write more than one object each per checkpoint.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from backend_client.service.client import ServiceClient
from dstl_service.repair.fsck import check_job
from dstl_service.repair.rebuild import rebuild_registry
from dstl_service.wire import ChangeSetRef, CheckpointRef
from storage.change_set import decode_change_set
from storage.clock import SystemClock, SystemIds
from storage.errors import LostChangesError, NotFoundError
from storage.object_store import ObjectStore
from storage.open import open_store
from tests.announced import wait_until_announced
from tools.servers.service.advertised import AdvertisedService
from tools.servers.service.job_driver import JobDriver

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

HOSTS = ("driver", "worker-1", "worker-2")


@contextmanager
def running(folder: Path, storage: str, host_id: str) -> Iterator[ServiceClient]:
    """Run a host's service that other hosts can call; yield a client of it. The service is killed in the end."""
    with AdvertisedService(folder, storage, host_id) as service:
        client = ServiceClient(service.endpoint_url, patience_s=60)
        try:
            wait_until_announced(client, host_id)
            yield client
        finally:
            client.close()
            service.stop(signal.SIGKILL)


class ManyHostsJob(JobDriver):
    """A job whose tasks run on several hosts; each partition's content is that of its sets."""

    def __init__(self, coordinator: ServiceClient, name: str) -> None:
        super().__init__(coordinator, name)
        self.expected: dict[bytes, bytes] = {}

    def task(self, client: ServiceClient, partition: int, value: bytes) -> list[ChangeSetRef]:
        """Run a task on a host: every job has the same operator, attempts and keys."""
        changes = {bytes([0, partition, 0, 1]) + str(self.next_id).encode(): value}
        self.expected |= changes
        return self.write(dict(changes), client=client, partition=partition, attempt=partition)

    def restored(self, client: ServiceClient, ref: CheckpointRef | None = None) -> dict[bytes, bytes | None]:
        """Return a table's restore from a host's service, by default at the newest checkpoint."""
        payloads = self.payloads(ref, client)
        return dict(change for payload in payloads for change in decode_change_set(payload, "restore"))


def objects_of(store: ObjectStore, job: str) -> Counter[str]:
    """Return the number of segment objects that each host wrote for a job."""
    return Counter(info.key.split("/")[2] for info in store.list(f"{job}/segments/"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ObjectStore:
    """Return the store that all hosts share; each test has its own jobs."""
    return open_store(tmp_path_factory.mktemp("store").as_uri())


@pytest.fixture(scope="module")
def hosts(store: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServiceClient]]:
    """Return the services of three hosts."""
    folder = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        yield [stack.enter_context(running(folder, store.url, host_id)) for host_id in HOSTS]


def test_jobs_of_one_service_stay_apart(hosts: list[ServiceClient]) -> None:
    """Two jobs with the same operators, partitions, attempts and keys never see or forget each other's sets."""
    client = hosts[0]
    one, two = ManyHostsJob(client, "one"), ManyHostsJob(client, "two")
    for _ in range(3):
        refs = two.task(client, 0, b"two")
        one.complete(one.task(client, 0, b"one"))  # forgets the sets received for `one`
        two.complete(refs)

    assert [job.restored(client) for job in (one, two)] == [one.expected, two.expected]
    assert [set(job.expected.values()) for job in (one, two)] == [{b"one"}, {b"two"}]
    with pytest.raises(NotFoundError):
        one.restored(client, two.base)
    with pytest.raises(LostChangesError):
        one.complete(two.task(client, 0, b"foreign"))


@pytest.mark.parametrize("workers", [[1, 2], [0, 1, 2], [2]])
def test_hosts_write_one_object_each(hosts: list[ServiceClient], store: ObjectStore, workers: list[int]) -> None:
    """I10: a checkpoint costs one object per host with tasks, wherever the object with its note is."""
    job = ManyHostsJob(hosts[0], f"job-{''.join(map(str, workers))}")
    for number in range(3):
        refs = [
            ref
            for partition in range(6)
            for ref in job.task(hosts[workers[partition % len(workers)]], partition, bytes([number, partition]))
        ]
        if number != 1:
            job.flush(refs)
        assert job.complete(refs).objects_written == len(workers) + 1

    assert objects_of(store, job.name) == {HOSTS[worker]: 3 for worker in workers}
    assert [job.restored(client) for client in hosts] == [job.expected] * 3
    for folder in ("job.json", "epochs/", "checkpoints/"):
        store.delete([info.key for info in store.list(f"{job.name}/{folder}")])
    report = rebuild_registry(store, job.name, SystemClock(), SystemIds(), write=True)
    assert (report.notes, report.checkpoint.split(".")[0]) == (3, "2")
    assert check_job(store, job.name).problems == []


def test_lost_host_costs_its_sets_only(hosts: list[ServiceClient], store: ObjectStore, tmp_path: Path) -> None:
    """A host that dies with sets that are not durable fails the checkpoint; the repeated batch succeeds."""
    driver, worker, _ = hosts
    job = ManyHostsJob(driver, "job")
    with running(tmp_path, store.url, "worker-3") as dying:
        refs = [*job.task(worker, 0, b"a"), *job.task(dying, 1, b"b")]
    with pytest.raises(LostChangesError, match="cannot be reached"):
        job.complete(refs)
    job.begin()
    job.complete([*job.task(worker, 0, b"a"), *job.task(worker, 1, b"b")])

    assert job.restored(driver) == job.expected
