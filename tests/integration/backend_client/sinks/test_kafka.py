"""Publishing to a real Kafka broker: what a reader of committed records sees."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count

import pyarrow as pa
import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
)

from backend_client.sinks.kafka import KafkaSink
from backend_client.sinks.protocol import Marker, Slot, SlotPublisher
from dstl_service.wire import CheckpointRef
from storage.errors import FencedError, InvalidInputError, UnavailableError
from tools.servers.kafka import KafkaBroker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

_numbers = count()
COLUMNS = pa.schema({"key": pa.string(), "value": pa.string()})


@pytest.fixture(scope="module")
def broker() -> Iterator[KafkaBroker]:
    with KafkaBroker(partitions=2) as running:
        yield running


@pytest.fixture
def slot() -> Slot:
    """A slot of a sink that no other test uses; its topics have its job's name."""
    return Slot(f"job{next(_numbers)}", "uid", "out", 1)


@pytest.fixture
def sink(broker: KafkaBroker, slot: Slot) -> KafkaSink:
    made = KafkaSink(broker.servers, slot.job)
    made.check(COLUMNS, [Slot(slot.job, "uid", "out", 0), slot])
    return made


def batch(*values: str) -> pa.RecordBatch:
    return pa.record_batch({"key": [value[:1] for value in values], "value": list(values)})


def marker(checkpoint_id: int) -> Marker:
    return Marker("uid", 1, CheckpointRef(checkpoint_id, 0, f"m{checkpoint_id}"))


def publish(sink: KafkaSink, slot: Slot, checkpoint_id: int, *values: str) -> None:
    publisher = sink.open(slot)
    try:
        assert publisher.publish([batch(*values)] if values else [], marker(checkpoint_id)) == len(values)
    finally:
        publisher.close()


def last(sink: KafkaSink, slot: Slot) -> Marker | None:
    publisher = sink.open(slot)
    try:
        return publisher.last_published()
    finally:
        publisher.close()


def committed(broker: KafkaBroker, topic: str) -> list[tuple[str, str]]:
    """Return key and value of all committed records, by partition in order."""
    consumer = Consumer(
        {
            "bootstrap.servers": broker.servers,
            "group.id": f"reader-{next(_numbers)}",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
        }
    )
    partitions = len(consumer.list_topics(topic, timeout=10).topics[topic].partitions)
    found: dict[int, list[tuple[str, str]]] = {}
    consumer.subscribe([topic])
    ended: set[int] = set()
    while len(ended) < partitions:
        message = consumer.poll(10)
        assert message is not None
        if message.error() is not None:
            ended.add(message.partition() or 0)
        else:
            record = ((message.key() or b"").decode(), (message.value() or b"").decode())
            found.setdefault(message.partition() or 0, []).append(record)
    consumer.close()
    return [record for partition in sorted(found) for record in found[partition]]


def test_records_and_marker_are_one_transaction(broker: KafkaBroker, sink: KafkaSink, slot: Slot) -> None:
    """Each key's records are in order; the marker is the newest published one, behind any number of empty ends."""
    assert last(sink, slot) is None
    publish(sink, slot, 0, "a1", "b1", "a2")
    publish(sink, slot, 1)
    publish(sink, slot, 2, "a3", "b2")
    assert last(sink, slot) == marker(2)
    for _ in range(20):  # openings abort nothing, but each may leave its mark
        last(sink, slot)
    assert last(sink, slot) == marker(2)
    seen = committed(broker, slot.job)
    assert [value for key, value in seen if key == "a"] == ["a1", "a2", "a3"]
    assert [value for key, value in seen if key == "b"] == ["b1", "b2"]


def test_older_publisher_is_fenced(broker: KafkaBroker, sink: KafkaSink, slot: Slot) -> None:
    """A paused publisher can publish nothing once another one has opened its slot, in the middle of its transaction."""

    def paused() -> Iterator[pa.RecordBatch]:
        yield batch("x1")
        publish(sink, slot, 0, "a1")
        yield batch("x2")

    older = sink.open(slot)
    assert older.last_published() is None
    with pytest.raises(FencedError, match="slot 1 of sink 'out' was opened by another publisher"):
        older.publish(paused(), marker(0))
    older.close()
    assert committed(broker, slot.job) == [("a", "a1")]
    assert last(sink, slot) == marker(0)


def _publish_and_die(sink: KafkaSink, slot: Slot, step: str) -> None:
    def records() -> Iterable[pa.RecordBatch]:
        yield batch(*(f"a{number}" for number in range(1000)))
        if step == "before the commit":
            time.sleep(0.2)  # some of it is at the broker
            os.kill(os.getpid(), signal.SIGKILL)

    publisher = sink.open(slot)
    publisher.publish(records(), marker(0))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("step", ["before the commit", "after the commit"])
def test_killed_publisher(broker: KafkaBroker, sink: KafkaSink, slot: Slot, step: str) -> None:
    """What it had not committed is never seen; what it had is known by the marker."""
    process = multiprocessing.get_context("spawn").Process(target=_publish_and_die, args=(sink, slot, step))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    found = last(sink, slot)
    seen = committed(broker, slot.job)
    if step == "before the commit":
        assert (found, seen) == (None, [])
        publish(sink, slot, 0, "b1")
        assert committed(broker, slot.job) == [("b", "b1")]
    else:
        assert found == marker(0)
        assert [value for _, value in seen] == [f"a{number}" for number in range(1000)]


def test_columns_of_a_record(broker: KafkaBroker, slot: Slot) -> None:
    """Topic, partition and headers come from columns; a null value is a deletion."""
    sink = KafkaSink(broker.servers)
    admin = AdminClient({"bootstrap.servers": broker.servers})
    admin.create_topics([NewTopic(f"{slot.job}-t", 3)])[f"{slot.job}-t"].result(10)
    headers = pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()}))
    rows = pa.record_batch(
        {
            "topic": [f"{slot.job}-t"] * 2,
            "partition": pa.array([2, 0], pa.int32()),
            "key": pa.array([b"k", None], pa.binary()),
            "value": pa.array(["v", None], pa.large_string()),
            "headers": pa.array([[("h", b"1"), ("h", b"2")], None], headers),
        }
    )
    sink.check(rows.schema, [Slot(slot.job, "uid", "out", 0), slot])
    publisher = sink.open(slot)
    assert publisher.publish([rows], marker(0)) == 2
    publisher.close()
    assert committed(broker, f"{slot.job}-t") == [("", ""), ("k", "v")]


def test_too_large_record_is_published_once_the_topic_allows_it(
    broker: KafkaBroker, sink: KafkaSink, slot: Slot
) -> None:
    """The error says what to raise; nothing of the transaction is seen before."""
    large = KafkaSink(broker.servers, slot.job, {"message.max.bytes": 10_000_000, "compression.type": "none"})
    value = "a" * 2_000_000
    with pytest.raises(UnavailableError, match=r"too large: raise max\.message\.bytes of the topic"):
        publish(large, slot, 0, "b1", value)
    assert committed(broker, slot.job) == []
    with pytest.raises(UnavailableError, match=r"message\.max\.bytes of broker and sink"):
        publish(sink, slot, 0, value)
    admin = AdminClient({"bootstrap.servers": broker.servers})
    entry = ConfigEntry("max.message.bytes", "10000000", incremental_operation=AlterConfigOpType.SET)
    change = ConfigResource(ConfigResource.Type.TOPIC, slot.job, incremental_configs=[entry])
    admin.incremental_alter_configs([change])[change].result(10)
    publish(large, slot, 0, "b1", value)
    assert sorted(len(value) for _, value in committed(broker, slot.job)) == [2, 2_000_000]


def test_broker_that_is_away(slot: Slot) -> None:
    """While it is away the error says so; when it is back, publishing goes on and nothing is doubled."""
    with KafkaBroker(partitions=1) as own:
        sink = KafkaSink(own.servers, slot.job, {"socket.timeout.ms": 2000, "transaction.timeout.ms": 4000})
        sink.check(COLUMNS, [Slot(slot.job, "uid", "out", 0), slot])
        publish(sink, slot, 0, "a1")
        publisher: SlotPublisher = sink.open(slot)
        own.stop()
        with pytest.raises(UnavailableError, match="check"):
            publisher.publish([batch("a2")], marker(1))
        publisher.close()
        own.start()
        assert last(sink, slot) in (marker(0), marker(1))
        if last(sink, slot) == marker(0):
            publish(sink, slot, 1, "a2")
        assert committed(own, slot.job) == [("a", "a1"), ("a", "a2")]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (pa.schema({"k": pa.string()}), "has the column value and optionally headers, key"),
        (pa.schema({"value": pa.int64()}), "column value must be a string or binary, it is int64"),
    ],
)
def test_columns_are_checked(broker: KafkaBroker, slot: Slot, columns: pa.Schema, message: str) -> None:
    """The error says what to select."""
    with pytest.raises(InvalidInputError, match=message):
        KafkaSink(broker.servers, "t").check(columns, [slot])


def test_limits_of_the_broker_are_checked(broker: KafkaBroker, slot: Slot) -> None:
    """A time-out that it forbids is found at the start, with both numbers; the markers get partitions as needed."""
    sink = KafkaSink(broker.servers, slot.job, {"transaction.timeout.ms": 86_400_000})
    with pytest.raises(InvalidInputError, match="is 86400000, and the brokers allow 900000"):
        sink.check(COLUMNS, [slot])
    slots = [Slot(slot.job, "uid", "out", number) for number in range(3)]
    sink = KafkaSink(broker.servers, slot.job)
    sink.check(COLUMNS, slots[:1])
    sink.check(COLUMNS, slots)
    publish(sink, slots[2], 0, "a1")
    sink.check(COLUMNS, slots[:2])
    with pytest.raises(InvalidInputError, match="needs 1 partitions, one for each slot, and cannot be changed"):
        KafkaSink(broker.servers, slot.job, marker_topic="not a topic").check(COLUMNS, slots[:1])
    with pytest.raises(InvalidInputError, match="needs a topic"):
        KafkaSink(broker.servers).check(COLUMNS, slots)


def test_secrets_are_not_shown(broker: KafkaBroker) -> None:
    """A password among the options is in no message."""
    assert "secret" not in repr(KafkaSink(broker.servers, "t", {"sasl.password": "secret"}))


def test_a_later_job_of_the_name_begins_anew(sink: KafkaSink, slot: Slot) -> None:
    """Markers of a deleted job say nothing of what its successor has published, and it finds its own behind them."""
    publish(sink, slot, 7, "a1")
    later = replace(slot, job_uid="other")
    assert last(sink, later) is None
    publisher = sink.open(later)
    publisher.publish([batch("a2")], Marker("other", 1, CheckpointRef(0, 0, "m")))
    publisher.close()
    publish(sink, slot, 8, "a3")
    assert last(sink, slot) == marker(8)
    assert last(sink, later) == Marker("other", 1, CheckpointRef(0, 0, "m"))
