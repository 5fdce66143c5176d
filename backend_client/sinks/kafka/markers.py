"""
Markers of slots in a topic of their own: slot n's newest marker is the last committed record of partition n.

A record's key is the job's uid: an earlier job of the same name may have left markers. The topic is compacted and kept
for ever. Offsets of a consumer group, which transactions could carry as well, expire
when a query stands still for a week.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic, TopicMetadata  # type: ignore[attr-defined]

from backend_client.sinks.kafka.errors import END_OF_PARTITION
from backend_client.sinks.protocol import Marker, Slot
from storage.errors import CorruptDataError, InvalidInputError, UnavailableError

_TOPIC_CONFIG = {
    "cleanup.policy": "compact",
    "segment.ms": "3600000",
    "min.cleanable.dirty.ratio": "0.1",
    "compression.type": "producer",
}
_REPLICAS = 3
"""The brokers' own default is often 1: records would outlive their markers, and be published again."""
_CHANGED_BY_OTHERS = (KafkaError.TOPIC_ALREADY_EXISTS, KafkaError.INVALID_PARTITIONS)
_GONE = (KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART)  # noqa: SLF001
_ADVICE = "if the topic was deleted, restore it with its records; to continue without them, give the sink another name"
_STEP_RECORDS = 16
_TIMEOUT_S = 15.0


class Newest(NamedTuple):
    """A slot's newest committed marker, None if it has none; and the offset behind all records that were read."""

    marker: Marker | None
    end: int


def newest_marker(connection: Mapping[str, Any], topic: str, slot: Slot, until: int | None = None) -> Newest:
    """
    Return a slot's newest committed marker, as far as the broker knows that takes itself for the partition's leader.

    Args:
        connection: Options of a client.
        topic: The topic of the markers.
        slot: The slot.
        until: The offset of a record of an open transaction: what is before it is read, however old an answer is.

    Raises:
        UnavailableError: The brokers do not answer.
        CorruptDataError: The partition has a record that is not a marker.
    """
    consumer = Consumer(
        {
            **connection,
            "group.id": f"{topic}.readers",  # never joined, and nothing is committed
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "fetch.wait.max.ms": 10,
            "fetch.error.backoff.ms": 20,
        }
    )
    timeout_s = 2 * float(connection["socket.timeout.ms"]) / 1000
    try:
        partition = TopicPartition(topic, slot.number)
        low, high = consumer.get_watermark_offsets(partition, timeout=timeout_s)
        records, end = _STEP_RECORDS, high
        begin: int | None = None
        while begin is None or begin > low:
            begin = max(low, high - records)
            first = TopicPartition(topic, slot.number, begin)
            found, end = _last(consumer, first, high, until, slot.job_uid.encode(), timeout_s)
            if found is not None:
                return Newest(_marker(found, topic, slot.number), end)
            records *= 8  # only ends of transactions, aborted records and markers of other jobs so far
    except KafkaException as error:
        cause = error.args[0]
        advice = _ADVICE if cause.code() in _GONE else "check the brokers; publishing is retried"
        raise UnavailableError(f"the markers in topic {topic!r} could not be read: {cause.str()}; {advice}") from error
    finally:
        consumer.close()
    return Newest(None, end)


def ensure_topic(connection: Mapping[str, Any], topic: str, slots: int, records: str | None = None) -> None:
    """
    Create the topic of the markers, or give it as many partitions as there are slots.

    Args:
        connection: Options of a client.
        topic: The topic of the markers.
        slots: Number of slots.
        records: The topic of the records; a new one has as many replicas at least.

    Raises:
        InvalidInputError: It has too few partitions, or it does not exist, and the brokers do not let it be changed.
        UnavailableError: The brokers do not answer.
    """
    admin = AdminClient(dict(connection))
    deadline = time.monotonic() + _TIMEOUT_S
    # Another job that shares the topic may have changed it meanwhile, and a broker does not know all changes at once.
    while (partitions := partitions_of(admin, topic)) < slots:
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"the topic {topic!r} of the sink's markers shows {partitions} partitions and needs {slots}, and that "
                f"did not change within {_TIMEOUT_S:g} s: check that all brokers are up, and that the user may read it"
            )
        if partitions == 0:
            made = admin.create_topics([_new_topic(admin, topic, slots, records)])[topic]
        else:
            made = admin.create_partitions([NewPartitions(topic, slots)])[topic]
        _wait_for(made, topic, slots)
        time.sleep(0.05)


def _new_topic(admin: AdminClient, topic: str, slots: int, records: str | None) -> NewTopic:
    found = admin.list_topics(timeout=_TIMEOUT_S)
    # A broker that is down is not among them: then the brokers refuse a topic that the check would refuse for ever.
    replicas = max(min(_REPLICAS, len(found.brokers)), replicas_of(found.topics.get(records or "")))
    config = {**_TOPIC_CONFIG, "min.insync.replicas": "2"} if replicas >= _REPLICAS else _TOPIC_CONFIG
    return NewTopic(topic, slots, replicas, config=config)


def replicas_of(found: TopicMetadata | None) -> int:
    """Return the least number of replicas of a topic's partitions, 0 if they are not known."""
    return min((len(partition.replicas) for partition in found.partitions.values()), default=0) if found else 0


def partitions_of(admin: AdminClient, topic: str) -> int:
    """Return a topic's number of partitions, 0 if it does not exist; `UnavailableError` if no broker answers."""
    try:
        found = admin.list_topics(timeout=_TIMEOUT_S).topics.get(topic)
    except KafkaException as error:
        raise UnavailableError(f"the Kafka brokers do not answer: {error}") from error
    return len(found.partitions) if found is not None and found.error is None else 0


def _wait_for(made: Future[None], topic: str, slots: int) -> None:
    try:
        made.result(_TIMEOUT_S)
    except KafkaException as error:
        if error.args[0].code() not in _CHANGED_BY_OTHERS:
            raise InvalidInputError(
                f"the topic {topic!r} of the sink's markers needs {slots} partitions, one for each slot, and cannot be "
                f"changed: {error.args[0].str()}; create it with cleanup.policy=compact, or give it more partitions"
            ) from error


def _last(
    consumer: Consumer, begin: TopicPartition, high: int, until: int | None, key: bytes, timeout_s: float
) -> tuple[Message | None, int]:
    """
    Return the last committed record of a key from an offset to the end of its partition, or to `until`; and that end.

    A committed record is not seen while a transaction is open that began before it, such as one of another job that
    shares the topic. So the end is that of all records, which is waited for. A new leader of the partition may know an
    earlier end for a moment, and answers as if that were all; it does not when it is asked for the end, `high`.
    """
    consumer.assign([begin])
    deadline, last, end = time.monotonic() + timeout_s, None, until
    while time.monotonic() < deadline:
        message = consumer.poll(0.1)
        if message is None:
            continue
        error = message.error()
        if error is None:
            last = message if message.key() == key else last
        elif error.code() == END_OF_PARTITION:
            end = max(high, consumer.get_watermark_offsets(begin, cached=True)[1]) if end is None else end
            if (message.offset() or 0) >= end:
                return last, message.offset() or 0
        elif error.code() != KafkaError.GROUP_AUTHORIZATION_FAILED:  # the group is never joined: no right is needed
            raise KafkaException(error)
    raise UnavailableError(
        f"the end of partition {begin.partition} of topic {begin.topic!r} was not reached within {timeout_s:g} s; if "
        "another client's transaction is open there, it ends by its time-out, or by kafka-transactions.sh abort"
    )


def _marker(message: Message, topic: str, slot: int) -> Marker:
    try:
        return Marker.parse((message.value() or b"").decode())
    except (InvalidInputError, UnicodeDecodeError) as error:
        raise CorruptDataError(
            f"the last record of topic {topic!r}, partition {slot}, is not a marker: {error}; only the sink may write"
        ) from error
