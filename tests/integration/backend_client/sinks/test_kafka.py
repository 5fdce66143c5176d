"""Publishing to a real Kafka broker: what a reader of committed records sees."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, Producer
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

from backend_client.sinks.kafka import KafkaSink, check, markers
from backend_client.sinks.kafka import sink as kafka_sink
from backend_client.sinks.kafka_options import connection_options
from backend_client.sinks.protocol import Marker, Slot, SlotPublisher
from dstl_service.wire import CheckpointRef
from storage.errors import FencedError, InvalidInputError, UnavailableError
from tests.support.kafka_reader import committed_records
from tools.servers.faults.toxiproxy import Toxiproxy
from tools.servers.kafka import KafkaBroker, with_users

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
    partitions = AdminClient({"bootstrap.servers": broker.servers}).list_topics(topic, 10).topics[topic].partitions
    records = [
        record
        for partition in sorted(partitions)
        for record in committed_records(broker.servers, topic, partition=partition)
    ]
    return [((record.key() or b"").decode(), (record.value() or b"").decode()) for record in records]


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


def test_marker_behind_an_open_transaction_is_waited_for(broker: KafkaBroker, slot: Slot) -> None:
    """Another job that shares the topic of markers died before its commit: a reader stops there, the slot does not."""
    sink = KafkaSink(broker.servers, slot.job, {"socket.timeout.ms": 1000}, marker_topic=f"{slot.job}.shared")
    sink.check(COLUMNS, [Slot(slot.job, "uid", "out", 0), slot])
    other = Producer({"bootstrap.servers": broker.servers, "transactional.id": f"{slot.job}-other"})
    other.init_transactions(30)
    for checkpoint_id in (0, 1):
        other.begin_transaction()
        other.produce(f"{slot.job}.shared", b"a marker", key=b"other", partition=slot.number)
        other.flush(30)
        publish(sink, slot, checkpoint_id, f"a{checkpoint_id}")
        with pytest.raises(UnavailableError, match=r"partition 1 of topic .* another client's transaction is open"):
            last(sink, slot)
        other.abort_transaction(30)
        assert last(sink, slot) == marker(checkpoint_id)


def test_old_marker_publishes_nothing_again(
    broker: KafkaBroker, sink: KafkaSink, slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A broker that the others do not reach takes itself for the leader, and tells a reader the marker of before that.

    Here the answer is an earlier one of the broker itself.
    """
    publish(sink, slot, 0, "a1")
    known = markers.newest_marker(connection_options(sink.servers, {}), f"{slot.job}.out.markers", slot)
    publish(sink, slot, 1, "a2")
    publisher = sink.open(slot)
    with monkeypatch.context() as cut_off:
        cut_off.setattr(kafka_sink, "newest_marker", lambda *_: known)
        assert publisher.last_published() == marker(0)
    with pytest.raises(UnavailableError, match=r"a broker told an old marker of slot 1 from topic .*\.markers'"):
        publisher.publish([batch("a2")], marker(1))
    publisher.close()
    assert last(sink, slot) == marker(1)
    assert committed(broker, slot.job) == [("a", "a1"), ("a", "a2")]


def test_deleted_topic_of_markers(broker: KafkaBroker, sink: KafkaSink, slot: Slot) -> None:
    """While the query runs nothing is published and nobody makes the topic again; the error says what to do."""
    publish(sink, slot, 0, "a1")
    topic = f"{slot.job}.out.markers"
    admin = AdminClient({"bootstrap.servers": broker.servers})
    admin.delete_topics([topic])[topic].result(10)
    with pytest.raises(UnavailableError, match=r"Unknown partition; if the topic was deleted, restore it"):
        last(sink, slot)


def test_marker_behind_one_of_another_job(broker: KafkaBroker, slot: Slot) -> None:
    """Jobs may share the topic of markers: one that publishes between a look and a publish is no obstacle."""
    shared = f"{slot.job}.shared"
    sink, other = (KafkaSink(broker.servers, topic, marker_topic=shared) for topic in (slot.job, f"{slot.job}-other"))
    for one in (sink, other):
        one.check(COLUMNS, [replace(slot, number=0), slot])
    publisher = sink.open(slot)
    assert publisher.last_published() is None
    publish(other, replace(slot, job_uid="other"), 0, "b1")
    for checkpoint_id in (0, 1):
        assert publisher.publish([batch(f"a{checkpoint_id}")], marker(checkpoint_id)) == 1
    publisher.close()
    assert last(sink, slot) == marker(1)
    assert committed(broker, slot.job) == [("a", "a0"), ("a", "a1")]


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


def test_slot_is_opened_over_a_slow_connection(
    broker: KafkaBroker, slot: Slot, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A producer asks for its id once a broker is connected; it would wait half a second before it asks again."""
    with Toxiproxy(broker.servers, tmp_path) as proxy, proxy.toxic("latency", latency=60):
        servers = proxy.proxy_url.removeprefix("http://")
        sink = KafkaSink(servers, slot.job, {"debug": "eos", "log_level": 7})
        sink.check(COLUMNS, [replace(slot, number=0), slot])
        publish(sink, slot, 0, "a1")
    told = capfd.readouterr().err
    assert "Acquired PID" in told
    assert "No brokers available" not in told


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
    """Uncommitted records are never seen; the marker tells the committed ones."""
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
    for column, kind, value, what in (
        ("topic", pa.string(), None, "has no topic"),
        ("topic", pa.string(), f"{slot.job}.out.markers", "names .*, the topic of the sink's markers"),
        ("headers", headers, [None], "has a header without a key"),
        ("headers", headers, [("h\0i", b"")], r"header whose key 'h\\x00i' has the character NUL"),
        ("topic", pa.string(), "t\0u", r"topic 't\\x00u', and no topic's name has the character NUL"),
        ("topic", pa.string(), "a b", r"for topic 'a b': .*; no topic has such a name"),
        ("partition", pa.int32(), 3, f"for topic '{slot.job}-t': .* names one that the topic does not have"),
        ("partition", pa.int64(), 2**40, "column partition has 1099511627776, which no topic has"),
        ("partition", pa.int64(), -1, "column partition has -1, which no topic has"),
    ):
        wrong = pa.array([value], kind)
        publisher = sink.open(slot)
        with pytest.raises(UnavailableError, match=what):
            publisher.publish([rows.slice(0, 1).set_column(rows.schema.names.index(column), column, wrong)], marker(1))
        publisher.close()
    assert committed(broker, f"{slot.job}-t") == [("", ""), ("k", "v")]


def test_text_of_headers(broker: KafkaBroker, slot: Slot) -> None:
    """A header's value may be text, with NUL characters, too; text that is not UTF-8 is told by its column."""
    texts = ["a\0b", "\0", "", None, "é"]
    kind = pa.list_(pa.struct({"key": pa.string(), "value": pa.string()}))
    rows = pa.record_batch({"value": ["v"], "headers": pa.array([[("h", text) for text in texts]], kind)})
    sink = KafkaSink(broker.servers, slot.job)
    sink.check(rows.schema, [Slot(slot.job, "uid", "out", 0), slot])
    publisher = sink.open(slot)
    assert publisher.publish([rows], marker(0)) == 1
    consumer = Consumer({"bootstrap.servers": broker.servers, "group.id": slot.job, "auto.offset.reset": "earliest"})
    consumer.subscribe([slot.job])
    record = consumer.poll(30)
    consumer.close()
    assert record is not None
    assert record.headers() == [("h", None if text is None else text.encode()) for text in texts]
    wrong = pa.array([b"\xff"], pa.binary()).view(pa.string())
    with pytest.raises(UnavailableError, match="column topic has text that is not UTF-8"):
        publisher.publish([rows.append_column("topic", wrong)], marker(1))
    publisher.close()


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


def test_broker_that_is_away(broker: KafkaBroker, slot: Slot) -> None:
    """While it is away the error says so; when it is back, publishing goes on and nothing is doubled."""
    sink = KafkaSink(broker.servers, slot.job, {"socket.timeout.ms": 2000, "transaction.timeout.ms": 4000})
    sink.check(COLUMNS, [Slot(slot.job, "uid", "out", 0), slot])
    publish(sink, slot, 0, "a1")
    publisher: SlotPublisher = sink.open(slot)
    broker.stop()
    try:
        with pytest.raises(UnavailableError, match="check"):
            publisher.publish([batch("a2")], marker(1))
        publisher.close()
    finally:
        broker.start()
    assert last(sink, slot) in (marker(0), marker(1))
    if last(sink, slot) == marker(0):
        publish(sink, slot, 1, "a2")
    assert committed(broker, slot.job) == [("a", "a1"), ("a", "a2")]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (pa.schema({"k": pa.string()}), "has the column value and optionally headers, key"),
        (pa.schema({"value": pa.int64()}), "column value must be a string or binary, it is int64"),
        (pa.schema({"value": pa.string(), "topic": pa.binary()}), "column topic must be a string, it is binary"),
        (pa.schema({"value": pa.string(), "partition": pa.string()}), "column partition must be an int, it is string"),
        *(
            (pa.schema({"value": pa.string(), "headers": kind}), "column headers must be an array<struct<key: string")
            for kind in (
                pa.map_(pa.string(), pa.binary()),
                pa.list_(pa.string()),
                pa.list_(pa.struct({"name": pa.string(), "value": pa.binary()})),
                pa.list_(pa.struct({"key": pa.string(), "value": pa.int64()})),
            )
        ),
    ],
)
def test_columns_are_checked(broker: KafkaBroker, slot: Slot, columns: pa.Schema, message: str) -> None:
    """The error says what to select; records and markers are apart."""
    with pytest.raises(InvalidInputError, match="cannot have the sink's markers, too"):
        KafkaSink(broker.servers, slot.job, marker_topic=slot.job).check(COLUMNS, [slot])
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
        KafkaSink(broker.servers, slot.job, marker_topic=".").check(COLUMNS, slots[:1])
    with pytest.raises(InvalidInputError, match="needs a topic"):
        KafkaSink(broker.servers).check(COLUMNS, slots)


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize(("others", "own"), [(2, 6), (6, 2), (6, 3)])
def test_jobs_that_share_a_topic_of_markers_start_at_once(
    broker: KafkaBroker, slot: Slot, monkeypatch: pytest.MonkeyPatch, exists: bool, others: int, own: int
) -> None:
    """Each gets its partitions, also if another one makes the topic, or adds some, between a look and a change."""
    connection, look = connection_options(broker.servers, {}), markers.partitions_of

    def look_before_another_start(admin: AdminClient, topic: str) -> int:
        monkeypatch.setattr(markers, "partitions_of", look)
        found = look(admin, topic)
        markers.ensure_topic(connection, topic, others)
        return found

    if exists:
        topic_of(broker, slot.job)
    monkeypatch.setattr(markers, "partitions_of", look_before_another_start)
    markers.ensure_topic(connection, slot.job, own)
    assert markers.partitions_of(AdminClient({"bootstrap.servers": broker.servers}), slot.job) == 6


def topic_of(broker: KafkaBroker, name: str, **config: str) -> str:
    """Return a new topic of one partition."""
    admin = AdminClient({"bootstrap.servers": broker.servers})
    admin.create_topics([NewTopic(name, 1, config=config)])[name].result(10)
    return name


@pytest.mark.parametrize("policy", ["delete", "compact,delete"])
def test_markers_are_kept_for_ever(broker: KafkaBroker, slot: Slot, policy: str) -> None:
    """A topic that deletes old markers is refused: without them output would be published again."""
    markers = topic_of(broker, f"{slot.job}-markers", **{"cleanup.policy": policy})
    with pytest.raises(InvalidInputError, match=f"cleanup.policy={policy}, which deletes markers"):
        KafkaSink(broker.servers, slot.job, marker_topic=markers).check(COLUMNS, [slot])


class ManyBrokers:
    """Answers as the client of a cluster; its topics have one partition each."""

    def __init__(self, brokers: int, **replicas: int) -> None:
        self.made: list[NewTopic] = []
        topics = {
            name: SimpleNamespace(
                error=None, partitions={0: SimpleNamespace(replicas=list(range(number)))} if number else {}
            )
            for name, number in replicas.items()
        }
        self._metadata = SimpleNamespace(brokers=dict.fromkeys(range(brokers)), topics=topics)

    def __call__(self, _options: object) -> ManyBrokers:
        return self

    def list_topics(self, *_: object, **__: object) -> SimpleNamespace:
        return self._metadata

    def create_topics(self, topics: list[NewTopic]) -> dict[str, Future[None]]:
        self.made += topics
        done: Future[None] = Future()
        done.set_result(None)
        for topic in topics:
            self._metadata.topics[topic.topic] = SimpleNamespace(error=None, partitions=[0] * topic.num_partitions)
        return {topic.topic: done for topic in topics}


@pytest.mark.parametrize(("brokers", "replicas", "in_sync"), [(1, 1, None), (2, 2, None), (3, 3, "2"), (9, 3, "2")])
def test_markers_are_replicated(
    monkeypatch: pytest.MonkeyPatch, brokers: int, replicas: int, in_sync: str | None
) -> None:
    """Whatever the brokers' default is: with one replica, markers could be lost and their records not."""
    admin = ManyBrokers(brokers)
    monkeypatch.setattr(markers, "AdminClient", admin)
    markers.ensure_topic({}, "markers", 4, "records")
    (made,) = admin.made
    assert (made.num_partitions, made.replication_factor) == (4, replicas)
    assert (made.config or {}).get("min.insync.replicas") == in_sync


@pytest.mark.parametrize(("brokers", "records"), [(9, 5), (2, 3)])
def test_markers_are_not_made_with_fewer_replicas_than_records(
    monkeypatch: pytest.MonkeyPatch, brokers: int, records: int
) -> None:
    """The start would refuse such a topic for ever, if one broker only was down when it was made."""
    admin = ManyBrokers(brokers, records=records)
    monkeypatch.setattr(markers, "AdminClient", admin)
    markers.ensure_topic({}, "markers", 4, "records")
    assert [made.replication_factor for made in admin.made] == [records]


def test_markers_have_as_many_replicas_as_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic that others have made with fewer is refused at the start."""
    monkeypatch.setattr(check, "AdminClient", ManyBrokers(3, few=1, many=3, new=0))
    found = check.ClusterCheck({}, {})
    found.replicas("many", "few")
    found.replicas("many", "many")
    found.replicas("unknown", "many")
    found.replicas("new", "many")
    with pytest.raises(InvalidInputError, match=r"markers has 1 replicas, topic 'many' has 3: .* published twice"):
        found.replicas("few", "many")


def test_topic_must_take_a_whole_batch(broker: KafkaBroker, slot: Slot) -> None:
    """A topic that would refuse batches of many small records is found at the start, with both numbers."""
    topic = topic_of(broker, f"{slot.job}-small", **{"max.message.bytes": "50000"})
    slots = [Slot(slot.job, "uid", "out", number) for number in range(2)]
    with pytest.raises(InvalidInputError, match=r"batch\.size of the sink is 1000000 bytes, .* takes 50000"):
        KafkaSink(broker.servers, topic).check(COLUMNS, slots)
    sink = KafkaSink(broker.servers, topic, {"batch.size": 50_000, "compression.type": "none"})
    sink.check(COLUMNS, slots)
    values = [f"a{number:0100d}" for number in range(3000)]
    publish(sink, slot, 0, *values)
    assert [value for _, value in committed(broker, topic)] == values


def test_a_compacted_topic_needs_keys(broker: KafkaBroker, slot: Slot) -> None:
    """Without a column of them each publish would be refused; a key that is null is named with the policy."""
    topic = topic_of(broker, f"{slot.job}-compacted", **{"cleanup.policy": "compact"})
    sink = KafkaSink(broker.servers, topic)
    slots = [Slot(slot.job, "uid", "out", number) for number in range(2)]
    with pytest.raises(InvalidInputError, match=r"has cleanup\.policy=compact, .* and the result has no column key"):
        sink.check(pa.schema({"value": pa.string()}), slots)
    sink.check(COLUMNS, slots)
    publisher = sink.open(slot)
    with pytest.raises(UnavailableError, match=r"cleanup\.policy=compact takes none whose key is null"):
        publisher.publish([pa.record_batch({"key": [None], "value": ["a1"]}, schema=COLUMNS)], marker(0))
    publisher.close()
    publish(sink, slot, 0, "a1")


def test_the_check_fences_nobody(broker: KafkaBroker, sink: KafkaSink, slot: Slot) -> None:
    """A query that is started while another one runs, and refused, leaves that one's publishers alone."""
    publisher = sink.open(slot)
    sink.check(COLUMNS, [replace(slot, number=0), slot])
    publisher.publish([batch("a1")], marker(0))
    publisher.close()
    assert last(sink, slot) == marker(0)


@pytest.mark.parametrize("option", ["no.such.option", "request.required.acks", "bootstrap.servers"])
def test_options_are_checked(broker: KafkaBroker, slot: Slot, option: str) -> None:
    """An option that does not exist, or that the sink sets itself, is found at the start."""
    with pytest.raises(InvalidInputError, match=option):
        KafkaSink(broker.servers, slot.job, {option: "1"}).check(COLUMNS, [slot])


def test_missing_rights_are_named_and_mended(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each right that the sink's user lacks is named, one after the other, at the start and while publishing."""
    monkeypatch.setattr(check, "_TIMEOUT_S", 5.0)
    slots = [replace(slot, number=0), slot]
    with KafkaBroker(partitions=2, settings=with_users(writer="right")) as own:
        as_user = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"}
        admin_options = {**as_user, "sasl.username": "admin", "sasl.password": "admin"}
        admin = AdminClient({"bootstrap.servers": own.servers, **admin_options})
        markers = f"{slot.job}.out.markers"
        for made in admin.create_topics([NewTopic(slot.job, 2)]).values():
            made.result(10)

        def rule(kind: ResourceType, name: str, pattern: ResourcePatternType, operation: AclOperation) -> AclBinding:
            return AclBinding(kind, name, pattern, "User:writer", "*", operation, AclPermissionType.ALLOW)

        def allow(*rules: AclBinding) -> None:
            for done in admin.create_acls(list(rules)).values():
                done.result(10)

        def sink(password: str = "right") -> KafkaSink:
            options = {**as_user, "sasl.username": "writer", "sasl.password": password, "socket.timeout.ms": 3000}
            return KafkaSink(own.servers, slot.job, options)

        topics, literal, prefixed = ResourceType.TOPIC, ResourcePatternType.LITERAL, ResourcePatternType.PREFIXED
        with pytest.raises(UnavailableError, match="check user and password"):
            sink("wrong").check(COLUMNS, slots)
        with pytest.raises(InvalidInputError, match=r"does not exist for the sink's user"):
            sink().check(COLUMNS, slots)
        allow(rule(topics, slot.job, literal, AclOperation.READ))
        with pytest.raises(InvalidInputError, match="may not WRITE topic"):
            sink().check(COLUMNS, slots)
        write = rule(topics, slot.job, literal, AclOperation.WRITE)
        allow(write)
        with pytest.raises(InvalidInputError, match="cannot be changed"):
            sink().check(COLUMNS, slots)
        needed = (AclOperation.CREATE, AclOperation.READ, AclOperation.WRITE)
        allow(*(rule(topics, markers, literal, operation) for operation in needed))
        with pytest.raises(UnavailableError, match="transactional ids, which begin with dstl-"):
            sink().check(COLUMNS, slots)
        allow(rule(ResourceType.TRANSACTIONAL_ID, "dstl-", prefixed, AclOperation.WRITE))
        sink().check(COLUMNS, slots)
        publish(sink(), slot, 0, "a1")
        for removed in admin.delete_acls([AclBindingFilter(*_fields(write))]).values():
            removed.result(10)
        with pytest.raises(UnavailableError, match="allow the sink's user to write to the topic"):
            publish(sink(), slot, 1, "a2")
        assert last(sink(), slot) == marker(0)
        allow(write)
        publish(sink(), slot, 1, "a2")
        assert last(sink(), slot) == marker(1)


def _fields(rule: AclBinding) -> tuple[Any, ...]:
    names = ("restype", "name", "resource_pattern_type", "principal", "host", "operation", "permission_type")
    return tuple(getattr(rule, name) for name in names)


def test_secrets_are_not_shown(broker: KafkaBroker) -> None:
    """A password among the options is in no message."""
    assert "secret" not in repr(KafkaSink(broker.servers, "t", {"sasl.password": "secret"}))


def test_a_later_job_of_the_name_begins_anew(sink: KafkaSink, slot: Slot) -> None:
    """Markers of a deleted job say nothing of what its successor has published, and it finds its own after them."""
    publish(sink, slot, 7, "a1")
    later = replace(slot, job_uid="other")
    assert last(sink, later) is None
    publisher = sink.open(later)
    publisher.publish([batch("a2")], Marker("other", 1, CheckpointRef(0, 0, "m")))
    publisher.close()
    publish(sink, slot, 8, "a3")
    assert last(sink, slot) == marker(8)
    assert last(sink, later) == Marker("other", 1, CheckpointRef(0, 0, "m"))
