"""A reader of committed records."""

from __future__ import annotations

from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition


def committed_values(servers: str, topic: str) -> list[bytes]:
    """Return the values of all committed records of a topic with one partition, in order."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    found = []
    while (message := consumer.poll(30)) is not None and message.error() is None:
        found.append(message.value() or b"")
    consumer.close()
    return found
