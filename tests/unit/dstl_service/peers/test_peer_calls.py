"""Calls to the services of other hosts: which hosts they reach, how long they take, and what they leave for others."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, cast

import pytest
from starlette.types import Message

from dstl_service.access.certificates import TlsSettings
from dstl_service.peers.addresses import FOLDER, PeerRegistry, announce, encode_entry, matches, origin_of, parse_allowed
from dstl_service.peers.calls import PeerCalls
from dstl_service.peers.client import PeerClient
from dstl_service.process.fair_slots import FairSlots
from dstl_service.settings import PeerSettings, ServiceSettings
from dstl_service.uploads.settings import UploadSettings
from dstl_service.wire import ChangeSetRef
from storage.errors import FencedError, InvalidInputError, LostChangesError, UnavailableError
from storage.memory_store import MemoryStore
from storage.model import SegmentHandle
from storage.testing import FakeClock, Fault, FaultKind, FaultyStore, RecordingStore
from tests.unit.dstl_service.http_life import Life, scope_of_post, service
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(180)

REF = ChangeSetRef("op", 0, 1, 1, 0, 0, 1, "other")
QUICK_S = 60.0  # a caller of a hung peer waits for HUNG_S
HUNG_S = 90
"""Far longer than a request takes, and far shorter than the wait for a hung peer."""


@contextmanager
def hung_peer() -> Iterator[tuple[str, list[socket.socket]]]:
    """Accept connections and never answer, like a suspended process; yield the address and the connections."""
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def take() -> None:
            while True:
                try:
                    taken.append(listener.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", taken
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in taken:
                connection.close()


@contextmanager
def answering_peer(status: int, body: bytes) -> Iterator[tuple[str, list[str | None]]]:
    """Answer every request with this; yield the address, and the tokens that were sent."""
    shown: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            shown.append(self.headers.get("authorization"))
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", shown
        finally:
            server.shutdown()
            thread.join()


def announced(store: MemoryStore, *urls: str) -> MemoryStore:
    """Announce the addresses of services in the store."""
    for url in urls:
        store.put(*encode_entry(origin_of(url)))
    return store


def away(life: Life, url: str, partition: int = 0) -> dict[str, Any]:
    """Return the reference of a set that another service received."""
    return {**life.append(partition=partition), "service_id": "other", "service_url": url}


class TestHungPeer:
    """B1: a peer that accepts connections and never answers delays only the requests that need it."""

    def test_hung_peers_leave_others_alone(self) -> None:
        """While many requests to hung peers are pending, the service is ready, and other jobs open and complete."""
        peers = PeerSettings(timeout_s=HUNG_S)
        with hung_peer() as (url, taken), service(announced(MemoryStore(), url), io_threads=4, peers=peers) as life:
            life.open()
            refs = [away(life, url, partition) for partition in range(40)]
            waiting = [
                life.portal.start_task_soon(_ask, life, f"{life.path}/persist", {"epoch": 1, "refs": [ref]})
                for ref in refs
            ]
            calls_max = PeerSettings().calls_per_host_max // 2  # of one job
            wait_until(lambda: len(taken) >= calls_max)
            began_s = time.monotonic()
            assert life.client.get("/ready").status_code == 200
            other = Life(life.client, "other")
            other.open()
            other.complete(0, None, other.append(b"one"))
            assert life.client.get(f"{other.path}/checkpoints").json()[0]["segments"] == 1

            assert time.monotonic() - began_s < QUICK_S
            assert len(taken) == calls_max
            for task in waiting:
                task.cancel()

    def test_answer_has_a_deadline(self) -> None:
        """A peer that does not answer in time counts as gone: its sets are lost, and the batch is executed again."""
        upload, peers = UploadSettings(timeout_ms=1000, attempts_max=1), PeerSettings(timeout_s=1)
        with hung_peer() as (url, _), service(announced(MemoryStore(), url), upload=upload, peers=peers) as life:
            life.open()
            answer = life.complete_raw(0, None, away(life, url))

            assert (answer.status_code, answer.json()["kind"]) == (410, "lost_changes")

    def test_deadline_holds_for_drops(self) -> None:
        """An answer that arrives one byte at a time has the same deadline as a missing one."""
        with hung_peer() as (url, taken):
            asked = threading.Thread(target=_drip, args=(taken,), daemon=True)
            asked.start()
            with pytest.raises(LostChangesError, match="cannot be reached"):
                PeerClient(lambda: None, 0.3).persist(url, "job", [REF], wait=True)


def _drip(taken: list[socket.socket]) -> None:
    wait_until(lambda: taken)
    try:
        taken[0].sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n")
        while True:
            taken[0].sendall(b"x")
    except OSError:
        return


async def _ask(life: Life, path: str, body: dict[str, Any]) -> None:
    """Send a request without waiting for its answer."""
    content = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]

    async def receive() -> Message:
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(_: Message) -> None:
        return

    await life.client.app(scope_of_post(path, headers), receive, send)


class TestWhoIsAsked:
    """C4: the token is sent only to services of this storage, and no part of their answers is passed on."""

    @pytest.mark.parametrize("by", ["nobody", "store", "operator", "pattern"])
    def test_token_goes_to_known_services_alone(self, by: str) -> None:
        """An address that neither the store nor the operator names receives no request, and so no token."""
        with answering_peer(500, b"secret words") as (url, shown):
            store = announced(MemoryStore(), url) if by == "store" else MemoryStore()
            allowed = {"operator": f"https://elsewhere:1, {url}", "pattern": "http://127.0.0.1:*"}.get(by)
            with service(store, token="own-token", peers=PeerSettings(allowed=allowed)) as life:
                life.client.headers["authorization"] = "Bearer own-token"
                life.open()
                answer = life.persist(away(life, url))

        assert shown == ([] if by == "nobody" else ["Bearer own-token"])
        assert answer.status_code == (400 if by == "nobody" else 503)
        assert "secret" not in answer.text

    @pytest.mark.parametrize(("allowed", "origin"), [("http://[fd00::1]:*", "http://[fd00::1]:7071")])
    def test_address_of_version_6_is_listed_as_it_is(self, allowed: str, origin: str) -> None:
        """The brackets of an IPv6 address are not a pattern."""
        registry = PeerRegistry(allowed, MemoryStore(), FairSlots(1).acquire, FakeClock(), needs_tls=False)

        assert asyncio.run(registry.check("job", origin)) == origin

    @pytest.mark.parametrize(
        ("pattern", "origin", "is_listed"),
        [
            ("http://10.0.0.*:7071", "http://10.0.0.17:7071", True),
            ("http://10.0.0.*:7071", "http://10.0.0.17.evil.example:7071", False),
            ("http://10.*:7071", "http://10.20.30.40:7071", True),
            ("http://10.*:7071", "http://10.20.30.40.evil.example:7071", False),
            ("http://host-*:7071", "http://host-3:7071", True),
            ("http://host-*:7071", "http://host-3.evil.example:7071", False),
            ("http://host-*.spark.example:7071", "http://host-3.spark.example:7071", True),
            ("http://host-*.spark.example:7071", "http://host-3.evil.example:7071", False),
            ("http://host-*", "http://host-3.evil.example:80", False),
            ("https://*.spark.example:7071", "https://a.b.spark.example:7071", True),
            ("https://*.spark.example:7071", "https://spark.example.evil:7071", False),
            ("https://*.spark.example:*", "https://a.spark.example:1", True),
            ("https://*:7071", "https://any.host:7071", True),
            ("https://*:7071", "http://any.host:7071", False),
            ("http://h?st-*:7071", "http://host-3:7071", False),
        ],
    )
    def test_pattern_lists_no_names_of_strangers(self, pattern: str, origin: str, is_listed: bool) -> None:
        """C34: who has a domain could have a host there whose name begins like the listed ones, and get the token."""
        assert matches(pattern, origin) is is_listed

    @pytest.mark.parametrize("tls", [{"ca_file": True}, {"certificate_file": True}], ids=str)
    def test_service_with_tls_asks_nobody_in_the_clear(self, tls: dict[str, bool], tmp_path: Any) -> None:
        """With TLS enabled, an http address is refused even if the store names it."""
        (tmp_path / "pem").touch()
        settings = TlsSettings(**dict.fromkeys(tls, tmp_path / "pem"))
        with answering_peer(200, b"{}") as (url, shown), pytest.MonkeyPatch.context() as patch:
            patch.setattr("dstl_service.access.certificates._client_context", lambda _: None)
            with service(announced(MemoryStore(), url), token="t", tls=settings) as life:
                life.client.headers["authorization"] = "Bearer t"
                life.open()
                answer = life.persist(away(life, url))

        assert (answer.status_code, shown) == (400, [])
        assert "https only" in answer.json()["message"]

    @pytest.mark.parametrize(
        ("url", "is_same"),
        [
            ("http://HOST:7071", True),
            ("http://host:7071/path", True),
            ("http://host", False),
            ("https://host:7071", False),
            ("http://host:7072", False),
            ("http://host.evil:7071", False),
        ],
    )
    def test_address_is_scheme_host_and_port(self, url: str, is_same: bool) -> None:
        """An address in another notation counts as announced only if it reaches the same listener."""
        assert (encode_entry(origin_of(url)) == encode_entry("http://host:7071")) is is_same

    @pytest.mark.parametrize("url", ["http://host:99999", "http://[::1", "http://:1", "http://..:x", "ftp://host:1"])
    def test_impossible_address_is_refused(self, url: str) -> None:
        """C8: an invalid address is invalid input wherever it is found, and never a failure of the service."""
        with service(MemoryStore()) as life:
            life.open()
            assert life.persist(away(life, url)).status_code == 400
        for make in (lambda: PeerSettings(allowed=url), lambda: ServiceSettings("memory://x", advertised_url=url)):
            with pytest.raises(InvalidInputError):
                make()

    def test_address_is_given_out_when_the_store_has_it(self) -> None:
        """A service that cannot announce itself gives out no address: its tasks make their sets durable themselves."""
        store = FaultyStore(MemoryStore(), Fault("put", FaultKind.FAIL_BEFORE, f"{FOLDER}/*"))
        clock = FakeClock()
        with service(store, clock, advertised_url="http://here:7071") as life:
            life.open()
            assert life.append(partition=0)["service_url"] is None
            clock.advance(5_000)  # the next announcement after a failure starts only after this time
            wait_until(lambda: _appended_url(life) == "http://here:7071")

    def test_entries_of_services_that_are_gone_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A cluster whose pods are replaced for years keeps a bounded number of entries: the most recently renewed."""
        monkeypatch.setattr("dstl_service.peers.addresses.ENTRIES_MAX", 3)
        clock = FakeClock()
        store = MemoryStore(clock=clock)
        for host in ("a", "b", "c", "a", "d", "e"):
            clock.advance(1)
            announce(store, f"http://{host}:1")

        kept = {encode_entry(f"http://{host}:1")[0] for host in ("a", "d", "e")}
        assert {info.key for info in store.list(f"{FOLDER}/")} == kept

    def test_address_is_announced_anew(self) -> None:
        """A service that receives sets stays among the most recently renewed entries, and gives out its address."""
        clock, store = FakeClock(), RecordingStore(MemoryStore())
        with service(store, clock, advertised_url="http://here:7071") as life:
            life.open()
            wait_until(lambda: _appended_url(life) == "http://here:7071")
            assert store.count("put", f"{FOLDER}/*") == 1
            clock.advance(3_600_000)
            assert _appended_url(life) == "http://here:7071"
            wait_until(lambda: store.count("put", f"{FOLDER}/*") == 2)

    @pytest.mark.parametrize(
        ("body", "expected"),
        [
            (b"no json: secret", UnavailableError),
            (b"[1]", UnavailableError),
            (b'{"kind": "fenced", "message": "secret", "context": {"secret": 1}}', FencedError),
            (b'{"kind": "lost_changes", "message": "secret"}', LostChangesError),
        ],
    )
    def test_answer_is_not_handed_on(self, body: bytes, expected: type[Exception]) -> None:
        """Only the kind of a peer's error is passed on: a caller that chose the address learns no text of it."""
        with answering_peer(409, body) as (url, _), pytest.raises(expected) as caught:
            PeerClient(lambda: None, 10).persist(url, "job", [REF], wait=True)
        assert "secret" not in str(caught.value)

    def test_answer_that_was_not_asked_for_is_refused(self) -> None:
        """The handles in a peer's answer match the requested sets exactly, or all of them are rejected."""
        with answering_peer(200, b'{"handles": []}') as (url, _), service(announced(MemoryStore(), url)) as life:
            life.open()
            answer = life.complete_raw(0, None, away(life, url))

        assert (answer.status_code, "wrong handles" in answer.text) == (503, True)


def _appended_url(life: Life) -> Any:
    return life.append()["service_url"]


class TestFairSlots:
    """Call slots that jobs share."""

    @staticmethod
    def run(story: Callable[[], Any]) -> Any:
        """Run a test coroutine."""
        return asyncio.run(asyncio.wait_for(story(), 60))

    def test_free_place_goes_to_who_has_fewest(self) -> None:
        """B13: a job that requests many slots first does not make another job wait for all of them."""
        order: list[str] = []

        async def hold(slots: FairSlots, key: str, let_go: asyncio.Event) -> None:
            async with slots.held(key):
                order.append(key)
                await let_go.wait()

        async def story() -> None:
            slots, first, rest = FairSlots(4), asyncio.Event(), asyncio.Event()
            tasks = [asyncio.create_task(hold(slots, "many", first)), asyncio.create_task(hold(slots, "many", rest))]
            tasks += [asyncio.create_task(hold(slots, key, rest)) for key in ("a", "b", "many", "many", "few")]
            for _ in range(3):
                await asyncio.sleep(0)
            assert order == ["many", "many", "a", "b"]
            first.set()
            rest.set()
            await asyncio.gather(*tasks)

        self.run(story)
        assert order == ["many", "many", "a", "b", "few", "many", "many"]

    def test_many_short_calls_keep_nobody_waiting(self) -> None:
        """B13: a job with one call does not wait until another job has none left, even with a single slot."""
        order: list[str] = []

        async def call(slots: FairSlots, key: str) -> None:
            async with slots.held(key):
                order.append(key)
                await asyncio.sleep(0)

        async def story() -> None:
            slots = FairSlots(1)
            await asyncio.gather(*(call(slots, key) for key in ["many"] * 10 + ["few"]))

        self.run(story)
        assert order.index("few") <= 2

    def test_one_key_has_a_share(self) -> None:
        """A key that has used its share waits although slots are free; other keys do not wait."""

        async def story() -> list[bool]:
            slots = FairSlots(4)
            for key in ("a", "a", "b"):
                await slots.acquire(key)
            slots.release("b")
            third = asyncio.create_task(slots.acquire("a"))
            other = asyncio.create_task(slots.acquire("b"))
            for _ in range(3):
                await asyncio.sleep(0)
            done = [third.done(), other.done()]
            slots.release("a")
            slots.release("b")
            await third
            return done

        assert self.run(story) == [False, True]

    def test_cancelled_wait_takes_no_place(self) -> None:
        """A caller that gives up waiting, even at the moment it is granted a slot, leaves the slot to the next one."""

        async def story() -> None:
            slots = FairSlots(1)
            await slots.acquire("a")
            waiting = [asyncio.create_task(slots.acquire(key)) for key in ("b", "c", "d")]
            await asyncio.sleep(0)
            waiting[0].cancel()
            slots.release("a")
            waiting[1].cancel()
            await waiting[2]
            slots.release("d")
            await slots.acquire("e")

        self.run(story)

    def test_holder_of_several_slots_is_not_overtaken(self) -> None:
        """A key's small request waits behind its large one; both get slots when there are enough, or it gives up."""

        async def story() -> None:
            slots = FairSlots(12)
            await slots.acquire("a", 3)
            large, small = (asyncio.create_task(slots.acquire("a", count)) for count in (4, 1))
            await asyncio.sleep(0)
            assert not slots.acquire_at_once("a")
            assert slots.acquire_at_once("b", 2)
            large.cancel()
            await small
            slots.release("a", 3)
            slots.release("a")
            slots.release("b", 2)
            await slots.acquire("c", 12)

        self.run(story)


class TestPlaces:
    """B1, B13: call slots are always returned, and no job holds slots that it does not use."""

    def test_call_that_cannot_begin_gives_its_places_back(self) -> None:
        """A host is called again when the system has threads again."""

        async def story() -> None:
            for _ in range(10):
                with pytest.raises(RuntimeError, match="no thread"):
                    await calls.persist("http://a:1", "job", [REF], wait=True, note=None)

        class NoThreads(ThreadPoolExecutor):
            def submit(self, *_: Any, **__: Any) -> Any:
                raise RuntimeError("no thread")

        calls = PeerCalls(_Peer(), cast("PeerRegistry", None), NoThreads(), 4, 2, 0.1)
        asyncio.run(story())

    def test_who_waits_for_the_share_of_its_job_keeps_no_host_from_others(self) -> None:
        """A job whose calls hang waits alone: other jobs call the same hosts."""
        hung = threading.Event()

        async def story() -> None:
            def ask(host: int, job: str) -> asyncio.Task[list[SegmentHandle]]:
                call = calls.persist(f"http://{host}:1", job, [REF], wait=True, note=None)
                return asyncio.get_running_loop().create_task(call)

            waiting = [ask(0, "hanging") for _ in range(2)] + [ask(1, "hanging") for _ in range(2)]
            await asyncio.sleep(0)
            assert await ask(1, "other") == []
            hung.set()
            await asyncio.gather(*waiting)

        with ThreadPoolExecutor(8) as threads:
            calls = PeerCalls(_Peer(hung), cast("PeerRegistry", None), threads, 4, 2, 60)
            try:
                asyncio.run(story())
            finally:
                hung.set()

    def test_calls_of_one_job_to_a_host_leave_others_theirs(self) -> None:
        """A host that is slow for one job is called for another job, however many calls of the first one wait."""
        hung = threading.Event()

        async def story() -> None:
            def ask(job: str, host: int = 0) -> asyncio.Task[list[SegmentHandle]]:
                call = calls.persist(f"http://{host}:1", job, [REF], wait=True, note=None)
                return asyncio.get_running_loop().create_task(call)

            waiting = [ask("slow") for _ in range(20)]
            await asyncio.sleep(0)
            assert await ask("other") == []
            hung.set()
            await asyncio.gather(*waiting)

        class Peer(PeerClient):
            def __init__(self) -> None:
                pass

            def persist(self, _: str, job: str, *__: Any, **___: Any) -> list[SegmentHandle]:
                assert job == "other" or hung.wait(120)
                return []

        with ThreadPoolExecutor(32) as threads:
            calls = PeerCalls(Peer(), cast("PeerRegistry", None), threads, 64, 4, 60)
            try:
                asyncio.run(story())
            finally:
                hung.set()


class _Peer(PeerClient):
    """Never answers; for the first host, only after it is told to."""

    def __init__(self, hung: threading.Event | None = None) -> None:
        self._hung = hung

    def persist(self, url: str, *_: Any, **__: Any) -> list[SegmentHandle]:
        if self._hung is not None and url == "http://0:1":
            assert self._hung.wait(120)
        return []


@pytest.mark.parametrize("url", ["http://user:5ecret@host:1", "user:5ecret@host:1", "ftp://5ecret@host", "5ecret@[::1"])
def test_address_with_password_is_refused_without_it(url: str) -> None:
    """The error names the host, and not what may be a password before it."""
    with pytest.raises(InvalidInputError, match="not a service's address") as caught:
        parse_allowed(f"http://good:1,{url}")

    assert "5ecret" not in str(caught.value)
    assert url[-5:] in str(caught.value)
