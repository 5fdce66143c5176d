"""Offsets that are committed to a consumer group of a real broker, and what it refuses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from backend_client.sources import consumer_group
from backend_client.sources.consumer_group import ConsumerGroup
from storage.errors import ConflictError, InvalidInputError, UnavailableError
from tests.support.kafka_reader import committed_offsets
from tests.waiting import wait_until
from tools.servers.kafka import KafkaBroker, with_users

pytestmark = pytest.mark.integration

USERS = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"}


def options(broker: KafkaBroker, user: str) -> dict[str, Any]:
    return {"bootstrap.servers": broker.servers, **USERS, "sasl.username": user, "sasl.password": user, "log_level": 0}


@pytest.fixture(scope="module")
def broker() -> Iterator[KafkaBroker]:
    with KafkaBroker(partitions=2, settings=with_users(reader="reader")) as running:
        admin = AdminClient(options(running, "admin"))
        for made in admin.create_topics([NewTopic("in", 2), NewTopic("gone", 1)]).values():
            made.result(10)
        wait_until(lambda: is_ready(running), what="the topic of groups' offsets")
        yield running


def is_ready(broker: KafkaBroker) -> bool:
    """Return whether offsets can be committed; the first commit of all makes the broker create its own topic."""
    try:
        ConsumerGroup("first", options(broker, "admin"), "job").commit({("in", 0): 0}, 0)
    except UnavailableError:
        return False
    return True


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


@pytest.fixture
def group(broker: KafkaBroker, name: str) -> ConsumerGroup:
    return ConsumerGroup(name, options(broker, "admin"), "job")


def committed(broker: KafkaBroker, group: str) -> dict[tuple[str, int], int]:
    return committed_offsets(broker.servers, group, options(broker, "admin"))


def test_offsets_are_committed(broker: KafkaBroker, name: str, group: ConsumerGroup) -> None:
    """Also lower ones, as after a rewind; of a deleted topic none, but those of others; a restarted driver goes on."""
    group.commit({("in", 0): 5, ("in", 1): 7}, 0)
    assert committed(broker, name) == {("in", 0): 5, ("in", 1): 7}
    group.commit({("in", 0): 2, ("in", 1): 7}, 1)
    assert committed(broker, name) == {("in", 0): 2, ("in", 1): 7}
    admin = AdminClient(options(broker, "admin"))
    admin.delete_topics(["gone"])["gone"].result(10)
    with pytest.raises(UnavailableError, match=r"takes no offsets of topic 'gone': .*; the topic no longer exists"):
        group.commit({("in", 0): 8, ("gone", 0): 1, ("in", 1): 9}, 2)
    assert committed(broker, name) == {("in", 0): 8, ("in", 1): 9}
    ConsumerGroup(name, options(broker, "admin"), "job").commit({("in", 0): 9}, 3)
    assert committed(broker, name) == {("in", 0): 9, ("in", 1): 9}


def joined_member(broker: KafkaBroker, name: str) -> Consumer:
    """Return a consumer that is an active member of a group and commits only when told to."""
    member = Consumer({**options(broker, "admin"), "group.id": name, "enable.auto.commit": False})
    member.subscribe(["in"])

    def joined() -> bool:
        member.poll(0.1)
        return bool(member.assignment())

    wait_until(joined)
    return member


def test_offsets_of_others_are_left_alone(broker: KafkaBroker, name: str, group: ConsumerGroup) -> None:
    """A group with offsets of a consumer or of another job is refused, though nobody uses it now."""
    consumer = Consumer({**options(broker, "admin"), "group.id": name})
    consumer.commit(offsets=[TopicPartition("in", 0, 3)], asynchronous=False)
    consumer.close()
    with pytest.raises(ConflictError, match="offsets that another consumer committed, for example of topic 'in'"):
        group.commit({("in", 0): 7, ("in", 1): 7}, 0)
    assert committed(broker, name) == {("in", 0): 3}
    ConsumerGroup(f"{name}-job", options(broker, "admin"), "job").commit({("in", 0): 5}, 0)
    with pytest.raises(ConflictError, match="name an unused group"):
        ConsumerGroup(f"{name}-job", options(broker, "admin"), "job2").commit({("in", 0): 6}, 0)


def test_active_members_are_told(broker: KafkaBroker, name: str, group: ConsumerGroup) -> None:
    """The broker refuses offsets of a group with members; they are committed when those are gone."""
    member = joined_member(broker, name)
    with pytest.raises(UnavailableError, match="it has active members: name a group that no consumer uses"):
        group.commit({("in", 0): 5}, 0)
    member.close()
    group.commit({("in", 0): 5}, 0)
    assert committed(broker, name) == {("in", 0): 5}


def test_offsets_of_members_that_came_later_are_left_alone(
    broker: KafkaBroker, name: str, group: ConsumerGroup
) -> None:
    """A consumer that joins the group of a running query, commits, and is away for a moment loses nothing."""
    group.commit({("in", 0): 5}, 0)
    member = joined_member(broker, name)
    with pytest.raises(UnavailableError, match="it has active members"):
        group.commit({("in", 0): 9}, 1)
    member.commit(offsets=[TopicPartition("in", 0, 3)], asynchronous=False)
    member.close()
    with pytest.raises(ConflictError, match="offsets that another consumer committed"):
        group.commit({("in", 0): 9}, 1)
    assert committed(broker, name) == {("in", 0): 3}


def test_missing_rights_are_named(broker: KafkaBroker, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """First the group's, then the topic's; no restart is needed when they are given."""
    admin = AdminClient(options(broker, "admin"))

    def allow(kind: ResourceType, resource: str) -> None:
        literal, read = ResourcePatternType.LITERAL, AclOperation.READ
        rule = AclBinding(kind, resource, literal, "User:reader", "*", read, AclPermissionType.ALLOW)
        admin.create_acls([rule])[rule].result(10)

    monkeypatch.setattr(consumer_group, "_TIMEOUT_S", 2.0)
    with pytest.raises(UnavailableError, match="check user and password"):
        wrong = {**options(broker, "reader"), "sasl.password": "wrong", "socket.timeout.ms": 1000}
        ConsumerGroup(name, wrong, "job").commit({("in", 0): 5}, 0)
    monkeypatch.undo()
    group = ConsumerGroup(name, options(broker, "reader"), "job")
    with pytest.raises(UnavailableError, match="allow the user to READ the group"):
        group.commit({("in", 0): 5}, 0)
    allow(ResourceType.GROUP, name)
    with pytest.raises(UnavailableError, match="allow the user to READ the topic"):
        group.commit({("in", 0): 5}, 0)
    allow(ResourceType.TOPIC, "in")
    group.commit({("in", 0): 5}, 0)
    assert committed(broker, name) == {("in", 0): 5}


def test_a_broker_that_hangs_is_given_up(
    broker: KafkaBroker, name: str, group: ConsumerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A try ends in bounded time; the next one after the broker's return commits."""
    group.commit({("in", 0): 5}, 0)
    monkeypatch.setattr(consumer_group, "_TIMEOUT_S", 1.0)
    broker.pause()
    try:
        begun = time.monotonic()
        with pytest.raises(UnavailableError, match="check that the brokers are up and reachable"):
            group.commit({("in", 0): 6}, 1)
        assert time.monotonic() - begun < 10
    finally:
        broker.resume()
    monkeypatch.undo()
    group.commit({("in", 0): 7}, 2)
    assert committed(broker, name) == {("in", 0): 7}


def test_unknown_options_are_refused() -> None:
    """An option that librdkafka does not know is found when the query starts."""
    with pytest.raises(InvalidInputError, match="the options of consumer group 'g' are refused"):
        ConsumerGroup("g", {"no.such.option": "1"}, "job")
