"""The topics as a reader of committed records sees them, and whether a transaction is open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # its types do not name them

_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Record:
    """A record with its headers as text."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Mapping[str, str]


def create_topics(servers: str, partitions: Mapping[str, int]) -> None:
    """Create topics."""
    topics = [NewTopic(name, count) for name, count in partitions.items()]
    admin = AdminClient({"bootstrap.servers": servers})
    for made in admin.create_topics(topics).values():
        made.result(_TIMEOUT_S)


def read_topic(servers: str, topic: str) -> list[Record]:
    """Return all committed records; those of a partition in order."""
    consumer = _consumer(servers, "read_committed", {"enable.partition.eof": True})
    try:
        partitions = list(consumer.list_topics(topic, _TIMEOUT_S).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
        found, left = list[Record](), len(partitions)
        while left:
            message = consumer.poll(_TIMEOUT_S)
            if message is None:
                raise TimeoutError(f"topic {topic} was not read within {_TIMEOUT_S:g} s")
            if (error := message.error()) is None:
                headers = {name: value.decode() for name, value in _headers(message)}
                found.append(
                    Record(message.partition() or 0, message.offset() or 0, message.key(), message.value(), headers)
                )
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - its public name
                left -= 1
            else:
                raise KafkaException(error)
        return found
    finally:
        consumer.close()


def _headers(message: Message) -> list[tuple[str, bytes]]:
    return cast("list[tuple[str, bytes]]", message.headers() or [])  # the library's types allow a mapping, too


class Transactions:
    """Watches a topic for records of transactions that are neither committed nor aborted."""

    def __init__(self, servers: str, topic: str, partitions: int) -> None:
        self._committed = _consumer(servers, "read_committed", {})
        self._all = _consumer(servers, "read_uncommitted", {})
        self._partitions = [TopicPartition(topic, number) for number in range(partitions)]

    def is_open(self) -> bool:
        """Return whether a transaction is open: its records are behind the end for readers of committed records."""
        return any(self._end(self._committed, item) < self._end(self._all, item) for item in self._partitions)

    def close(self) -> None:
        """Close the connections."""
        self._committed.close()
        self._all.close()

    def _end(self, consumer: Consumer, partition: TopicPartition) -> int:
        return int(consumer.get_watermark_offsets(partition, timeout=_TIMEOUT_S)[1])


def _consumer(servers: str, isolation: str, options: Mapping[str, bool]) -> Consumer:
    connection = {"bootstrap.servers": servers, "group.id": "reader", "isolation.level": isolation}
    return Consumer({**connection, "enable.auto.commit": False, **options})
