"""Limits on the number and slowness of clients, decided on connections that say what they wait for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from dstl_service.http.connections import ENDING_S, UNREAD_S, Connections, Phase
from dstl_service.process.logs import LogLimiter
from dstl_service.settings import HttpSettings
from storage.testing import FakeClock

BOUNDS = HttpSettings(connections_max=3, head_timeout_s=20, body_grace_s=10, body_bytes_per_s_min=100)


@dataclass(eq=False)
class Client:
    """A connection whose client is controlled by a test."""

    phase: Phase = Phase.HEAD
    heads: int = 0
    body_bytes: int = 0
    is_held_back: bool = False
    is_answering: bool = False
    unread_bytes: int = 0
    client: tuple[str, int] = ("host", 1)
    ended: list[int] = field(default_factory=list)

    def refuse(self, status: int, message: str, headers: str = "") -> None:
        """Record why it was closed."""
        assert message
        self.ended.append(status)

    def end(self) -> None:
        """Record that it was closed."""
        self.ended.append(0)


def with_clients(*clients: Client, story: Callable[[Connections], None]) -> None:
    """Run a story against a server with these clients."""

    async def tell() -> None:
        connections = Connections(BOUNDS, LogLimiter(FakeClock()))
        for client in clients:
            assert connections.admit(client)
        story(connections)

    asyncio.run(tell())


@pytest.mark.parametrize("phase", [Phase.HEAD, Phase.BODY])
def test_request_that_never_ends_is_ended(phase: Phase) -> None:
    """B12: a head or a body of which nothing more arrives times out."""
    client, limit_s = Client(phase), 20 if phase is Phase.HEAD else 10

    def story(connections: Connections) -> None:
        for _ in range(limit_s):
            connections.look(1.0)
        assert client.ended == []
        connections.look(1.0)
        assert client.ended == [408]

    with_clients(client, story=story)


def test_body_must_keep_a_rate() -> None:
    """B12: a body that trickles in is ended; one at the required rate is not, however long it is."""
    drops, steady = Client(Phase.BODY), Client(Phase.BODY)

    def story(connections: Connections) -> None:
        for _ in range(1000):
            drops.body_bytes += 1
            steady.body_bytes += 100
            connections.look(1.0)
        assert (drops.ended[:1], steady.ended) == ([408], [])

    with_clients(drops, steady, story=story)


@pytest.mark.parametrize(
    "client",
    [Client(Phase.BODY, is_held_back=True), Client(Phase.NOTHING, is_answering=True), Client(Phase.NOTHING)],
    ids=str,
)
def test_service_waits_for_itself_alone(client: Client) -> None:
    """B12: a client is not slow while its request is answered or while the service reads nothing from it."""

    def story(connections: Connections) -> None:
        for _ in range(1000):
            connections.look(1.0)
        assert client.ended == []

    with_clients(client, story=story)


def test_answer_that_is_not_read_is_ended() -> None:
    """B12: a client that reads nothing of an answer times out; one that reads slowly does not."""
    stuck, slow = (Client(Phase.NOTHING, is_answering=True, unread_bytes=100_000) for _ in range(2))

    def story(connections: Connections) -> None:
        for turn in range(int(UNREAD_S) + 1):
            slow.unread_bytes -= turn % 60 == 0
            connections.look(1.0)
            assert stuck.ended == []
        connections.look(1.0)
        assert (stuck.ended, slow.ended) == ([408], [])

    with_clients(stuck, slow, story=story)


def test_new_request_begins_anew() -> None:
    """The rate is measured per request: many small bodies in a row do not count as one slow body."""
    client = Client(Phase.BODY)

    def story(connections: Connections) -> None:
        for turn in range(100):
            client.phase, client.body_bytes = (Phase.BODY, 5) if turn % 2 else (Phase.NOTHING, 5)
            connections.look(9.0)
        assert client.ended == []

    with_clients(client, story=story)


def test_idle_connection_makes_room() -> None:
    """B12: at the limit the longest idle connection is closed; one in use stays."""
    busy, older, newer = Client(Phase.NOTHING, is_answering=True), Client(Phase.NOTHING), Client(Phase.HEAD)

    def story(connections: Connections) -> None:
        connections.look(1.0)
        newer.phase = Phase.NOTHING
        connections.look(1.0)
        assert connections.admit(Client())
        assert (busy.ended, older.ended, newer.ended) == ([], [0], [])

    with_clients(busy, older, newer, story=story)


def test_refused_connection_counts_until_its_file_is_free() -> None:
    """B12: a refused client that does not hang up is aborted, and its place is not reused before."""
    stays, goes, busy = Client(), Client(), Client(Phase.NOTHING, is_answering=True)

    def story(connections: Connections) -> None:
        connections.look(21.0)
        assert (stays.ended, goes.ended, len(connections)) == ([408], [408], 3)
        connections.forget(goes)
        connections.look(ENDING_S)
        assert (stays.ended, len(connections)) == ([408], 2)
        connections.look(1.0)
        assert (stays.ended, goes.ended, len(connections)) == ([408, 0], [408], 1)

    with_clients(stays, goes, busy, story=story)


def test_refused_connection_makes_room_first() -> None:
    """B12: connections that are ending make room before idle ones."""
    refused, idle, busy = Client(), Client(Phase.NOTHING), Client(Phase.NOTHING, is_answering=True)

    def story(connections: Connections) -> None:
        connections.look(21.0)
        assert connections.admit(Client())
        assert (refused.ended, idle.ended, busy.ended) == ([408, 0], [], [])

    with_clients(refused, idle, busy, story=story)


def test_handshakes_count_and_make_room_for_newer_ones() -> None:
    """B12: a client that connects and sends nothing takes no place from served or later clients."""
    idle, crowd = Client(Phase.NOTHING), [Client() for _ in range(100)]

    def story(connections: Connections) -> None:
        for handshake in crowd:
            assert connections.begin_handshake(handshake)
            assert len(connections) <= BOUNDS.connections_max
        assert idle.ended == []
        assert [handshake.ended for handshake in crowd] == [[0]] * 98 + [[]] * 2

    with_clients(idle, story=story)


def test_heads_that_do_not_come_make_room_for_newer_connections() -> None:
    """B12: clients that connect and send no head take no place from served or later clients."""
    idle, crowd = Client(Phase.NOTHING), [Client() for _ in range(100)]

    def story(connections: Connections) -> None:
        for client in crowd:
            connections.look(0.1)
            assert connections.admit(client)
            assert len(connections) <= BOUNDS.connections_max
        assert idle.ended == []
        assert [client.ended for client in crowd] == [[0]] * 98 + [[]] * 2

    with_clients(idle, story=story)


def test_bodies_of_answered_requests_make_room_for_newer_connections() -> None:
    """B12: an answered request whose body never arrives takes no place: a stranger may send one to an open path."""
    read, crowd = Client(Phase.BODY, is_answering=True), [Client(Phase.BODY) for _ in range(100)]

    def story(connections: Connections) -> None:
        for client in crowd:
            connections.look(0.01)
            assert connections.admit(client)
            assert len(connections) <= BOUNDS.connections_max
        assert read.ended == []

    with_clients(read, story=story)


def test_host_with_most_silent_connections_makes_room() -> None:
    """B12: a host with many silent connections makes room before another host's, however old that one is."""
    slow, crowd = Client(client=("other", 1)), [Client(client=("crowd", port)) for port in range(100)]

    def story(connections: Connections) -> None:
        connections.look(1.0)
        for client in crowd:
            assert connections.admit(client)
        assert slow.ended == []

    with_clients(slow, story=story)


def test_client_that_asks_makes_no_room() -> None:
    """A client whose head has arrived meanwhile, or whose last request is being answered, is not silent."""
    asked, answered, silent = Client(), Client(is_answering=True), Client()

    def story(connections: Connections) -> None:
        connections.look(1.0)
        asked.phase, asked.heads, asked.is_answering = Phase.BODY, 1, True
        assert connections.admit(Client(Phase.BODY, is_answering=True))
        assert (asked.ended, answered.ended, silent.ended) == ([], [], [0])
        assert not connections.admit(Client())

    with_clients(asked, answered, silent, story=story)


def test_connection_in_use_is_not_idle() -> None:
    """At the limit a connection in constant use stays, even if no check coincided with a request."""
    used, idle, busy = Client(Phase.NOTHING), Client(Phase.NOTHING), Client(Phase.NOTHING, is_answering=True)

    def story(connections: Connections) -> None:
        for _ in range(10):
            used.heads += 1
            connections.look(1.0)
        used.heads += 1
        assert connections.admit(Client())
        assert (used.ended, idle.ended, busy.ended) == ([], [0], [])

    with_clients(used, idle, busy, story=story)


def test_bodies_of_two_requests_are_not_one() -> None:
    """A client that is in another long body at every check is not slow."""
    client = Client(Phase.BODY)

    def story(connections: Connections) -> None:
        for turn in range(100):
            client.heads, client.body_bytes = turn, 10 + turn
            connections.look(9.0)
        assert client.ended == []

    with_clients(client, story=story)


def test_few_handshakes_are_not_broken_off_for_the_idle() -> None:
    """Two clients that connect at the same time while all others are idle both get a place."""
    idle = [Client(Phase.NOTHING) for _ in range(3)]
    first, second = Client(), Client()

    def story(connections: Connections) -> None:
        assert connections.begin_handshake(first)
        assert connections.begin_handshake(second) is True
        assert (first.ended, second.ended, len(connections)) == ([], [], 3)

    with_clients(*idle, story=story)


def test_handshake_has_the_time_of_a_head() -> None:
    """B12: a handshake that does not end times out, and its place is free."""
    handshake = Client()

    def story(connections: Connections) -> None:
        assert connections.begin_handshake(handshake)
        connections.look(20.0)
        assert handshake.ended == []
        connections.look(1.0)
        assert (handshake.ended, len(connections)) == ([0], 0)

    with_clients(story=story)


def test_handshake_hands_its_place_over() -> None:
    """A connection that completed its handshake already has a place, whatever the number of connections."""
    busy = [Client(Phase.NOTHING, is_answering=True) for _ in range(2)]
    handshake, client = Client(), Client(Phase.BODY, is_answering=True)

    def story(connections: Connections) -> None:
        assert connections.begin_handshake(handshake)
        assert connections.admit(client, handshake)
        assert (len(connections), handshake.ended) == (3, [])
        assert not connections.begin_handshake(Client())

    with_clients(*busy, story=story)


def test_refusal_at_limit_is_one_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    """B12: if no connection is idle, a new one is refused, with one log line a second."""
    clients = [Client(Phase.NOTHING, is_answering=True) for _ in range(3)]

    def story(connections: Connections) -> None:
        with caplog.at_level(logging.WARNING, "dstl_service"):
            assert [connections.admit(Client()) for _ in range(100)] == [False] * 100
        connections.forget(clients[0])
        assert connections.admit(Client())

    with_clients(*clients, story=story)
    assert [record.message for record in caplog.records] == ["too many connections"]
