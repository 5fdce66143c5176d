"""A reader of committed records, and of a consumer group's offsets."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, Message, TopicPartition

_TIMEOUT_S = 30.0
_OPEN_S = 1.0
"""A transaction that is open for longer stays open."""


def committed_records(
    servers: str, topic: str, options: Mapping[str, Any] | None = None, partition: int = 0
) -> list[Message]:
    """
    Return all committed records of a partition, by default that of a topic with only one, in order.

    A commit is answered before readers see the transaction. So the end of all records is waited for, unless a
    transaction stays open.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "reader",  # never joined, and nothing is committed
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,
            **(options or {}),
        }
    )
    begin = TopicPartition(topic, partition, OFFSET_BEGINNING)
    # Also waits for a connection: a consumer that fetches before it has one tries again after half a second.
    end = consumer.get_watermark_offsets(begin, timeout=_TIMEOUT_S)[1]
    consumer.assign([begin])
    found: list[Message] = []
    reached, until_s = -1, time.monotonic() + _TIMEOUT_S
    while reached < end and time.monotonic() < until_s:
        message = consumer.poll(0.05)
        if message is not None and message.error() is None:
            found.append(message)
        elif message is not None:
            reached, until_s = message.offset() or 0, time.monotonic() + _OPEN_S
            end = max(end, consumer.get_watermark_offsets(begin, cached=True)[1])
    consumer.close()
    return found


def committed_values(
    servers: str, topic: str, options: Mapping[str, Any] | None = None, partition: int = 0
) -> list[bytes]:
    """Return the values of these records."""
    return [record.value() or b"" for record in committed_records(servers, topic, options, partition)]


def committed_offsets(servers: str, group: str, options: Mapping[str, Any] | None = None) -> dict[tuple[str, int], int]:
    """Return a consumer group's offsets by topic and partition, as monitoring of Kafka sees them."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": group, **(options or {})})
    topics = consumer.list_topics(timeout=30).topics
    asked = [
        TopicPartition(name, number)
        for name, topic in topics.items()
        if not name.startswith("__")
        for number in topic.partitions
    ]
    found = consumer.committed(asked, timeout=30)
    consumer.close()
    return {(partition.topic, partition.partition): partition.offset for partition in found if partition.offset >= 0}


def has_open_transaction(servers: str, topic: str, options: Mapping[str, Any] | None = None) -> bool:
    """Return whether the topic's first partition has records of a transaction that has not ended."""
    ends = []
    for level in ("read_committed", "read_uncommitted"):
        names = {"bootstrap.servers": servers, "group.id": "reader", "isolation.level": level, **(options or {})}
        consumer = Consumer(names)
        ends.append(consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=30)[1])
        consumer.close()
    return ends[0] < ends[1]
