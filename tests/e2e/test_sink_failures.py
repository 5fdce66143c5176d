"""
Causes outside the query that keep Kafka from taking output: nothing is lost if they are fixed while it runs.

``make outages`` runs the outages longer than every time-out of the sink.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)
from pyspark.sql import SparkSession

from backend_client import ChangelogStateBackend
from backend_client.service.job_session import JobSession, connect
from backend_client.sinks.kafka import KafkaSink
from backend_client.sinks.protocol import Sink, Slot
from tests.e2e.kafka_query import KafkaQuery, SuspendedSink
from tests.support.kafka_reader import has_open_transaction
from tests.support.machine import fill, small_disk
from tests.waiting import wait_until
from tools.servers.kafka import KafkaBroker, with_users

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

OUTAGE_S = float(os.environ.get("DSTL_KAFKA_OUTAGE_S", "0"))
"""How long a broker is away at least; 0: until the query has noticed it, with short time-outs."""
TIMED_OUT_TRIES = 3
OVERTAKEN_TRIES = 3
"""On a busy machine a publisher that is overtaken may give up by its own time-out, before a broker's answer."""
SHORT: dict[str, Any] = {} if OUTAGE_S else {"socket.timeout.ms": 1500, "transaction.timeout.ms": 5000}
OPTIONS: dict[str, Any] = {
    "batch.size": 50_000,
    "compression.type": "none",
    "topic.metadata.propagation.max.ms": 500,
}
USERS = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "log_level": 0}
Start = Callable[..., KafkaQuery]


def user(broker: KafkaBroker, name: str) -> dict[str, Any]:
    """Return the options of a client with a user's rights."""
    return {"bootstrap.servers": broker.servers, **USERS, "sasl.username": name, "sasl.password": name}


@pytest.fixture(scope="module")
def broker() -> Iterator[KafkaBroker]:
    settings = {
        "auto.create.topics.enable": "false",
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
    }
    with KafkaBroker(settings={**with_users(writer="writer"), **settings}) as running:
        yield running


@pytest.fixture
def admin(broker: KafkaBroker) -> AdminClient:
    return AdminClient(user(broker, "admin"))


@pytest.fixture
def topic(admin: AdminClient, request: pytest.FixtureRequest) -> str:
    name = str(request.node.name).replace("[", "-").rstrip("]")
    admin.create_topics([NewTopic(name, 1, config={"max.message.bytes": "50000"})])[name].result(10)
    return name


@pytest.fixture
def sink(broker: KafkaBroker, topic: str) -> KafkaSink:
    options = {name: value for name, value in user(broker, "admin").items() if name != "bootstrap.servers"}
    return KafkaSink(broker.servers, topic, {**options, **OPTIONS, **SHORT})


@pytest.fixture
def start(
    spark: SparkSession,
    make_backend: Callable[..., ChangelogStateBackend],
    tmp_path: Path,
    topic: str,
    broker: KafkaBroker,
    caplog: pytest.LogCaptureFixture,
) -> Start:
    """Return a function that makes the query of a sink, in a job of the topic's name."""
    caplog.set_level(logging.WARNING, "backend_client")

    def make(sink: Sink, options: dict[str, Any] | None = None) -> KafkaQuery:
        backend = make_backend(job=topic)
        return KafkaQuery(spark, backend, tmp_path, sink, topic, options or user(broker, "admin"), caplog)

    return make


def test_refused_records(start: Start, sink: KafkaSink, topic: str, admin: AdminClient) -> None:
    """A record too large for the topic, and a topic that was deleted."""
    with start(sink) as query:
        query.add("a", "b")
        query.check()
        query.add("a", "wide")
        query.wait_for_warning("a record is too large: raise max.message.bytes of the topic")
        assert "wide 1" not in query.seen()
        entry = ConfigEntry("max.message.bytes", "200000", incremental_operation=AlterConfigOpType.SET)
        change = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
        admin.incremental_alter_configs([change])[change].result(10)
        query.check()

        before = query.seen()
        admin.delete_topics([topic])[topic].result(10)
        query.add("b", "c")
        query.wait_for_warning("create the topic")
        admin.create_topics([NewTopic(topic, 1)])[topic].result(10)
        query.query.processAllAvailable()
        query.check([*before, *query.seen()])


def test_rights_are_taken_and_given_back(
    start: Start, broker: KafkaBroker, topic: str, admin: AdminClient, sink: KafkaSink
) -> None:
    """The right to write, while the query runs: the log says which, and output waits for it."""

    def rule(kind: ResourceType, name: str, operation: AclOperation) -> AclBinding:
        allow = AclPermissionType.ALLOW
        return AclBinding(kind, name, ResourcePatternType.PREFIXED, "User:writer", "*", operation, allow)

    def allow(*rules: AclBinding) -> None:
        for done in admin.create_acls(list(rules)).values():
            done.result(10)

    write = rule(ResourceType.TOPIC, topic, AclOperation.WRITE)
    others = [rule(ResourceType.TOPIC, topic, right) for right in (AclOperation.READ, AclOperation.CREATE)]
    allow(write, *others, rule(ResourceType.TRANSACTIONAL_ID, "dstl-", AclOperation.WRITE))
    as_writer = {**sink.options, "sasl.username": "writer", "sasl.password": "writer"}
    with start(KafkaSink(broker.servers, topic, as_writer)) as query:
        query.add("a", "b")
        query.check()
        names = ("restype", "name", "resource_pattern_type", "principal", "host", "operation", "permission_type")
        taken = AclBindingFilter(*(getattr(write, name) for name in names))
        for removed in admin.delete_acls([taken]).values():
            removed.result(10)
        query.add("a", "c")
        query.wait_for_warning("allow the sink's user to write to the topic")
        assert "c 1" not in query.seen()
        allow(write)
        query.check()


@pytest.mark.parametrize("kind", ["hangs", "away"])
def test_broker_that_gives_no_answer(start: Start, sink: KafkaSink, broker: KafkaBroker, kind: str) -> None:
    """Longer than every time-out: the log says so, batches go on, and their output comes when the broker is back."""
    with start(sink) as query:
        query.add("a", "b")
        query.check()
        begun = time.monotonic()
        if kind == "hangs":
            broker.pause()
        else:
            broker.stop()
        try:
            for _ in range(3):
                query.add("a", "b")
            query.wait_for_warning("check that the brokers are up")
            wait_until(lambda: len(query.backend.recent_progress) == 4, what="the batches meanwhile")
            time.sleep(max(0.0, begun + OUTAGE_S - time.monotonic()))
        finally:
            if kind == "hangs":
                broker.resume()
            else:
                broker.start()
        query.check()


def test_publisher_is_suspended_in_its_transaction(
    start: Start, sink: KafkaSink, broker: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    """Until the transaction has timed out at the broker, and until another publisher has opened the slot."""
    suspended = SuspendedSink(sink, tmp_path)
    with start(suspended) as query:
        query.add("a", "b")
        query.check()

        admin, refusals = user(broker, "admin"), list[str]()
        # Where its client first notices that its own time is up, it only says that.
        while not any("transaction timed out at the broker" in refusal for refusal in refusals):
            assert len(refusals) < TIMED_OUT_TRIES, refusals
            wait = suspended.order()
            query.add("a", "b")
            pid = wait()
            assert has_open_transaction(broker.servers, topic, admin)
            wait_until(lambda: not has_open_transaction(broker.servers, topic, admin), what="its time-out")
            os.kill(pid, signal.SIGCONT)
            query.check()
            refusals.append(suspended.refusal.read_text())

        refusals.clear()
        while not any("was opened by another publisher" in refusal for refusal in refusals):
            assert len(refusals) < OVERTAKEN_TRIES, refusals
            wait = suspended.order()
            query.add("a", "b")
            pid = wait()
            job = JobSession.find(connect(query.backend.settings), query.backend.settings)
            assert job is not None
            for number in (0, 1):
                other = sink.open(Slot(topic, job.job_uid, "output", number))
                assert other.last_published() is not None
                other.close()
            os.kill(pid, signal.SIGCONT)
            query.check()
            refusals.append(suspended.refusal.read_text())


def test_disk_of_the_broker_is_full(start: Start, tmp_path: Path) -> None:
    """A real disk: the broker ends, the log says what to look for, and when there is space nothing is missing."""
    with small_disk(tmp_path / "disk", 24 << 20) as disk:
        settings = {"log.dirs": str(disk / "data"), "metadata.log.dir": str(tmp_path / "metadata")}
        with KafkaBroker(partitions=1, settings=settings) as own:
            sink = KafkaSink(own.servers, "full", {**OPTIONS, **SHORT})
            with start(sink, {"bootstrap.servers": own.servers}) as query:
                query.topic = "full"
                query.add("a", "b")
                query.check()
                fill(disk)
                query.add("a", *(f"wide-{number}" for number in range(100)))
                query.wait_for_warning("check that the brokers are up and reachable, and have space")
                assert "No space left on device" in own.log_path.read_text(encoding="utf-8", errors="replace")
                own.stop(signal.SIGKILL)
                (disk / "filler").unlink()
                own.start()
                query.check()
