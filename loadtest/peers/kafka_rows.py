"""Events and rows in Kafka, for engines that read and write nothing else."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from loadtest.peers.jobs.progress import key_of

EVENTS, ROWS = "events", "rows"
_PARTITIONS = 2
_TIMEOUT_S = 60.0
_ROW = struct.Struct(">qd")
_AT_ONCE = 10_000


def put_events(brokers: str, events: int, keys: int) -> None:
    """Create the topics, and put all events into them."""
    admin = AdminClient({"bootstrap.servers": brokers})
    topics = [NewTopic(name, _PARTITIONS, 1) for name in (EVENTS, ROWS)]
    for future in admin.create_topics(topics).values():
        future.result()
    producer = Producer({"bootstrap.servers": brokers, "linger.ms": 50, "queue.buffering.max.messages": 200_000})
    for number in range(events):
        if number % _AT_ONCE == 0:
            producer.poll(0)
        while True:
            try:
                producer.produce(EVENTS, struct.pack(">d", number), str(key_of(number, keys)).encode())
                break
            except BufferError:
                producer.poll(1)
    if producer.flush(_TIMEOUT_S):
        raise KafkaException("not all events were stored in time")


def rows_stored(consumer: Consumer) -> int:
    """Return how many rows the topic has, markers of transactions included."""
    ends = (consumer.get_watermark_offsets(TopicPartition(ROWS, number), _TIMEOUT_S) for number in range(_PARTITIONS))
    return sum(end for _, end in ends)


def new_consumer(brokers: str) -> Consumer:
    """Return a consumer that sees committed rows only."""
    settings = {"bootstrap.servers": brokers, "group.id": "check", "isolation.level": "read_committed"}
    return Consumer({**settings, "enable.partition.eof": True, "enable.auto.commit": False})


def rows_of_topic(brokers: str) -> Iterator[tuple[int, int]]:
    """Yield key and count of all committed rows."""
    consumer = new_consumer(brokers)
    consumer.assign([TopicPartition(ROWS, number, 0) for number in range(_PARTITIONS)])
    left = _PARTITIONS
    while left:
        for message in consumer.consume(_AT_ONCE, 1.0):
            key, value = message.key(), message.value()
            if message.error() is not None:
                left -= 1
            elif key is not None and value is not None:
                yield int(key), _ROW.unpack(value)[0]
    consumer.close()
