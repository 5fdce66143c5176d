"""A reader of committed records, and of a consumer group's offsets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition


def committed_values(
    servers: str, topic: str, options: Mapping[str, Any] | None = None, partition: int = 0
) -> list[bytes]:
    """Return the values of all committed records of a partition, by default that of a topic with only one, in order."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            **(options or {}),
        }
    )
    consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING)])
    found = []
    while (message := consumer.poll(30)) is not None and message.error() is None:
        found.append(message.value() or b"")
    consumer.close()
    return found


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
