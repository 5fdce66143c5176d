"""
Sidecars without an address: they connect to the coordinator themselves, and it has them store their change sets.

A failure means that each task stores its own objects, that sets of a host count as stored that are not, or that
somebody without the job's token gets in.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from backend_client.service.client import ServiceClient
from backend_client.service.host_link import linked_coordinator, silent_hosts
from backend_client.service.restore import read_change_sets
from dstl_service.links.certificates import make_server_context, pinned_context
from dstl_service.links.connection import HEARTBEAT_S, SILENT_HEARTBEATS_MAX
from dstl_service.links.frames import encode_frame
from dstl_service.links.hub import BACK_WITHIN_S, SILENT_BACK_WITHIN_S
from dstl_service.wire import ChangeSetRef, LinkAddress, Linked, OpenLinks
from storage.errors import DstlError, FencedError, InvalidInputError, LostChangesError
from storage.open import open_store
from tests.support.machine import Host
from tests.waiting import wait_until
from tools.servers.programs import ServerError
from tools.servers.service.job_driver import JobDriver
from tools.servers.service.process import ServiceProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

LOOPBACK = "127.0.0.1"


class HostService(ServiceProcess):
    """A service in a network namespace; its Unix socket is reached from everywhere."""

    def __init__(self, storage: str, host: Host) -> None:
        super().__init__(storage)
        self._host = host

    def command(self, command: list[str]) -> list[str]:
        """Run it there."""
        return self._host.command(command)


@pytest.fixture
def storage(tmp_path: Path) -> str:
    """Return the URL of an empty storage."""
    return (tmp_path / "store").as_uri()


@pytest.fixture
def start(storage: str) -> Iterator[Callable[[], ServiceProcess]]:
    """Return a function that starts the sidecar of one more host."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(ServiceProcess(storage))


def client_of(service: ServiceProcess, patience_s: float = 60.0) -> ServiceClient:
    """Return a client of a sidecar."""
    return ServiceClient(service.address, patience_s=patience_s)


def links_of(job: JobDriver, host: str = LOOPBACK) -> LinkAddress:
    """Have the coordinator of a job accept links."""
    answer = job.client.post(f"{job.path}/link-address", asdict(OpenLinks(job.epoch, host, host)))
    return LinkAddress(**answer)


def connect(client: ServiceClient, address: LinkAddress, job: str = "job") -> str | None:
    """Have a sidecar connect to a coordinator; return the coordinator's id, None if there is no connection."""
    return Linked(**client.post(f"/v1/jobs/{job}/links", asdict(address))).coordinator_id


def segment_objects(storage: str, job: str = "job") -> list[str]:
    """Return the keys of all objects with change sets."""
    return [info.key for info in open_store(storage).list(f"{job}/segments/")]


def test_host_stores_the_sets_of_all_its_tasks_in_one_object(storage: str, start: Callable[[], ServiceProcess]) -> None:
    """One object for each host and checkpoint, although the host has no address."""
    coordinator, *hosts = start(), start(), start()
    job = JobDriver(client_of(coordinator))
    clients = [client_of(host) for host in hosts]
    address = links_of(job)
    assert {connect(client, address) for client in clients} == {str(job.client.get("/v1/info")["service_id"])}

    for checkpoint in range(3):
        refs = [
            ref
            for number in range(6)
            for ref in job.write(
                {b"\0\0k%d" % number: b"v%d" % checkpoint}, client=clients[number % 2], partition=number
            )
        ]
        assert all(ref.service_url is None and ref.handle is None for ref in refs)
        job.flush(refs)
        response = job.complete(refs)
        assert response.objects_written == 3, "an object of each host, and the manifest"

    assert len(segment_objects(storage)) == 6
    assert len(job.payloads()) == 18


def test_sets_of_a_host_whose_process_died_are_lost(start: Callable[[], ServiceProcess]) -> None:
    """I7: the batch is told within seconds, and succeeds when it is executed again."""
    coordinator, host = start(), start()
    job, client = JobDriver(client_of(coordinator)), client_of(host)
    address = links_of(job)

    def commit(attempt: int) -> list[ChangeSetRef]:
        refs = job.write({b"\0\0k": b"v"}, client=client, attempt=attempt)
        assert linked_coordinator(client, "job", address, refs[-1].service_id) is not None
        return refs

    refs = commit(1)
    host.restart()
    begun = time.monotonic()

    with pytest.raises(LostChangesError):
        job.complete(refs)

    assert time.monotonic() - begun < 3 * BACK_WITHIN_S
    job.begin()
    job.complete(commit(2))
    assert len(job.payloads()) == 1


def test_host_may_end_while_the_function_runs(storage: str, start: Callable[[], ServiceProcess]) -> None:
    """I7: once the sets are stored the coordinator has their handles; hours may pass until the batch is completed."""
    coordinator, host = start(), start()
    job, client = JobDriver(client_of(coordinator)), client_of(host)
    connect(client, links_of(job))
    refs = job.write({b"\0\0k": b"v"}, client=client)
    job.flush(refs)
    wait_until(lambda: segment_objects(storage))
    host.stop()

    job.complete(refs)

    assert len(job.payloads()) == 1


def test_linked_sidecar_is_not_idle(storage: str) -> None:
    """A sidecar stays as long as its coordinator, which may ask for what it received; then it ends as usual."""
    with ServiceProcess(storage) as coordinator, ServiceProcess(storage, {"DSTL_IDLE_EXIT_S": "1"}) as host:
        job, client = JobDriver(client_of(coordinator)), client_of(host)
        connect(client, links_of(job))
        refs = job.write({b"\0\0k": b"v"}, client=client)

        with pytest.raises(ServerError, match="did not end"):
            host.wait_for_end(5)
        job.complete(refs)
        coordinator.stop()

        assert host.wait_for_end(60) in (0, -signal.SIGTERM)


def test_host_that_was_paused_comes_back(start: Callable[[], ServiceProcess]) -> None:
    """
    A process that stands still for seconds counts as lost, soon, and connects again by itself.

    Its tasks run elsewhere by then, so waiting for its sets would only cost time; it serves the batch's next try.
    """
    coordinator, host = start(), start()
    job, client = JobDriver(client_of(coordinator)), client_of(host)
    address = links_of(job)
    connect(client, address)
    refs = job.write({b"\0\0k": b"v"}, client=client)
    os.kill(host.pid, signal.SIGSTOP)
    begun = time.monotonic()
    try:
        with pytest.raises(LostChangesError, match="no link"):
            job.complete(refs)
    finally:
        os.kill(host.pid, signal.SIGCONT)
    assert time.monotonic() - begun < 2 * (HEARTBEAT_S * (SILENT_HEARTBEATS_MAX + 1) + SILENT_BACK_WITHIN_S)

    wait_until(lambda: silent_hosts(job.client, "job") == [], what="the host's link")
    job.begin()
    job.complete(job.write({b"\0\0k": b"w"}, client=client, attempt=2))
    assert len(job.payloads()) == 1


def test_host_that_was_cut_off_is_reached_again(storage: str) -> None:
    """
    A link that is cut silently is noticed by both sides; the host connects when the network is back.

    Meanwhile the coordinator lists it as silent.
    """
    with Host() as machine, HostService(storage, machine) as coordinator, ServiceProcess(storage) as host:
        job, client = JobDriver(client_of(coordinator)), client_of(host)
        address = links_of(job, machine.address)
        connect(client, address)
        refs = job.write({b"\0\0k": b"v"}, client=client)

        assert silent_hosts(job.client, "job") == []

        machine.cut_off()
        with pytest.raises(LostChangesError, match="no link"):
            job.complete(refs)
        assert len(silent_hosts(job.client, "job")) == 1
        machine.connect()
        connect(client, address)
        assert silent_hosts(job.client, "job") == []

        job.begin()
        job.complete(job.write({b"\0\0k": b"w"}, client=client, attempt=2))
        assert len(job.payloads()) == 1


def test_tasks_of_a_host_that_cannot_connect_store_their_sets_themselves(
    start: Callable[[], ServiceProcess], caplog: pytest.LogCaptureFixture
) -> None:
    """A port that nobody listens on costs seconds once, and a warning that names the setting."""
    coordinator, host = start(), start()
    job = JobDriver(client_of(coordinator))
    with socket.socket() as unused:
        unused.bind((LOOPBACK, 0))
        nowhere = replace(links_of(job), port=unused.getsockname()[1])

        assert linked_coordinator(client_of(host), "job", nowhere, "host") is None
        begun = time.monotonic()
        assert linked_coordinator(client_of(host), "job", nowhere, "host") is None

    assert time.monotonic() - begun < 1
    assert "link_port sets the port" in caplog.text


def test_host_reads_the_sets_of_another_one_through_the_coordinator(start: Callable[[], ServiceProcess]) -> None:
    """A second pass gets the first one's change sets on any host, also as the first task there."""
    coordinator, first, second = start(), start(), start()
    job = JobDriver(client_of(coordinator))
    address = links_of(job)
    connect(client_of(first), address)

    def read(service: ServiceProcess, refs: list[ChangeSetRef]) -> list[tuple[bytes, bytes | None]]:
        (changes,) = read_change_sets(client_of(service), "job", job.epoch, refs, address)
        return list(changes.pairs())

    here = job.write({b"\0\0k": b"v"})
    there = job.write({b"\0\0k": b"w"}, client=client_of(first), partition=1)

    assert read(second, here) == [(b"\0\0k", b"v")]
    assert read(second, there) == read(coordinator, there) == [(b"\0\0k", b"w")]
    assert coordinator.log_path.read_text().count("a host is linked") == 2, "the coordinator needs no link to itself"


def test_former_host_that_is_the_coordinator_now_reaches_the_hosts_itself(start: Callable[[], ServiceProcess]) -> None:
    """A new driver on an executor's host asks no coordinator of the old driver, which lives and has no links left."""
    former, coordinator, host = start(), start(), start()
    old = links_of(JobDriver(client_of(former)))
    for service in (coordinator, host):
        connect(client_of(service), old)
    job = JobDriver(client_of(coordinator))
    address = links_of(job)
    connect(client_of(host), address)
    refs = job.write({b"\0\0k": b"v"}, client=client_of(host))

    (changes,) = read_change_sets(client_of(coordinator), "job", job.epoch, refs, address)

    assert list(changes.pairs()) == [(b"\0\0k", b"v")]


def test_new_driver_gets_a_new_token_and_the_old_one_none(start: Callable[[], ServiceProcess]) -> None:
    """An address belongs to an epoch: hosts of a driver that lost its job are not hosts of the next one."""
    coordinator, host = start(), start()
    old = JobDriver(client_of(coordinator))
    before = links_of(old)
    assert links_of(old) == before
    connect(client_of(host), before)

    new = JobDriver(client_of(coordinator))
    after = links_of(new)

    assert (after.port, after.certificate) == (before.port, before.certificate)
    assert after.token != before.token
    with pytest.raises(FencedError):
        links_of(old)
    assert connect(client_of(host), before) is None
    assert connect(client_of(host), after) is not None


def test_stranger_gets_no_answer(start: Callable[[], ServiceProcess]) -> None:
    """Without the job's token nothing is answered, whatever is sent; connections that say nothing are closed."""
    coordinator = start()
    address = links_of(JobDriver(client_of(coordinator)))
    other = links_of(JobDriver(client_of(coordinator), "other"))
    hello = {"job": "job", "token": address.token, "service_id": "s"}
    for sent in (
        b"GET /v1/info HTTP/1.1\r\nhost: x\r\n\r\n",
        b"",
        b"\xff" * 100,
        (1 << 20).to_bytes(4, "big"),
        (10).to_bytes(4, "big") + b"[" * 10,
        encode_frame({}),
        encode_frame({**hello, "token": "x"}),
        encode_frame({**hello, "token": other.token}),
        encode_frame({**hello, "token": None}),
        encode_frame({**hello, "job": "none"}),
        encode_frame({**hello, "service_id": "../x"}),
        encode_frame({"id": 1, "request": {"persist": {}}}),
    ):
        assert answer_to(address, sent) == b"", sent
    with socket.create_connection((address.host, address.port), 20) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert b"HTTP" not in plain.recv(100)
    assert json.loads(answer_to(address, encode_frame(hello))[4:])["service_id"]


def answer_to(address: LinkAddress, sent: bytes) -> bytes:
    """Return the first bytes of the listener's answer."""
    with (
        socket.create_connection((address.host, address.port), 20) as plain,
        pinned_context(address.certificate).wrap_socket(plain) as connection,
    ):
        connection.sendall(sent)
        try:
            return connection.recv(1000)
        except ConnectionResetError:
            return b""


def test_strangers_do_not_keep_hosts_out(start: Callable[[], ServiceProcess]) -> None:
    """Connections that say nothing are few for each address, so that a host at another address is let in."""
    coordinator, host = start(), start()
    job = JobDriver(client_of(coordinator))
    address = links_of(job)
    with ExitStack() as stack:
        for _ in range(60):
            silent = stack.enter_context(socket.socket())
            silent.bind(("127.0.0.2", 0))
            silent.connect((address.host, address.port))
            silent.setblocking(False)

        assert connect(client_of(host), address)


def test_another_certificate_is_not_trusted(start: Callable[[], ServiceProcess]) -> None:
    """The token goes only to the coordinator whose certificate came with it."""
    _, stranger = make_server_context()
    coordinator, host = start(), start()
    address = links_of(JobDriver(client_of(coordinator)))

    assert connect(client_of(host), replace(address, certificate=stranger)) is None
    with pytest.raises(InvalidInputError, match="certificate"):
        connect(client_of(host), replace(address, certificate="none"))
    with pytest.raises(ssl.SSLError), socket.create_connection((address.host, address.port), 20) as plain:
        pinned_context(stranger).wrap_socket(plain)


def test_request_over_a_link_calls_no_address(start: Callable[[], ServiceProcess]) -> None:
    """A process with a job's token cannot have the coordinator send its own token to an address."""
    coordinator = start()
    job = JobDriver(client_of(coordinator))
    address = links_of(job)
    (ref,) = job.write({b"\0\0k": b"v"})
    with socket.create_server((LOOPBACK, 0)) as trap:
        trap.settimeout(0.5)
        url = f"http://{LOOPBACK}:{trap.getsockname()[1]}"
        request = {"epoch": job.epoch, "refs": [asdict(replace(ref, service_id="gone", service_url=url))]}
        with (
            socket.create_connection((address.host, address.port), 20) as plain,
            pinned_context(address.certificate).wrap_socket(plain) as connection,
        ):
            connection.sendall(encode_frame({"job": "job", "token": address.token, "service_id": "s"}))
            connection.sendall(encode_frame({"id": 1, "request": {"persist": {**request, "wait": True, "note": None}}}))
            received = b""
            while b'"error"' not in received:
                received += connection.recv(10_000)
        assert b"lost_changes" in received
        with pytest.raises(TimeoutError):
            trap.accept()


def test_only_a_sidecar_on_a_unix_socket_has_links(storage: str, tmp_path: Path) -> None:
    """A caller on TCP can neither have a service listen nor have it connect anywhere."""
    from tools.servers.service.advertised import AdvertisedService

    with AdvertisedService(tmp_path, storage, "host") as service:
        job = JobDriver(ServiceClient(service.endpoint_url))
        with pytest.raises(InvalidInputError, match="advertised_url"):
            links_of(job)
        with pytest.raises(InvalidInputError, match="advertised_url"):
            connect(job.client, LinkAddress(LOOPBACK, 1, "", ""))


def test_address_of_another_machine_is_refused(start: Callable[[], ServiceProcess]) -> None:
    """The error names the address and what to set."""
    job = JobDriver(client_of(start()))

    with pytest.raises(InvalidInputError, match=r"spark\.driver\.bindAddress"):
        links_of(job, "203.0.113.1")


def test_links_end_with_their_processes(start: Callable[[], ServiceProcess]) -> None:
    """Both processes stop in time although they have a link, and the port is closed."""
    coordinator, host = start(), start()
    job = JobDriver(client_of(coordinator))
    address = links_of(job)
    connect(client_of(host), address)

    coordinator.stop()
    host.stop()

    def is_closed() -> bool:
        with pytest.raises(OSError, match="refused"), socket.create_connection((address.host, address.port), 5):
            pass
        return True

    assert wait_until(is_closed)


def test_unknown_job_has_no_links(start: Callable[[], ServiceProcess]) -> None:
    """A request for a job that does not exist opens no port."""
    client = client_of(start())

    with pytest.raises(DstlError, match="job"):
        client.post("/v1/jobs/none/link-address", asdict(OpenLinks(1, LOOPBACK, LOOPBACK)))
