"""Which offsets of a checkpoint belong to which Kafka cluster. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from backend_client.sinks.kafka_options import connection_options, of_librdkafka
from dstl_service.wire import source_offsets
from storage.errors import InvalidInputError

OPTION = "consumergroup"
"""The writer's option with the group's name; with a dot and a name of librdkafka: how the brokers are reached."""
_SECURITY = ("security.", "sasl.", "ssl.")

Positions: TypeAlias = Mapping[tuple[str, int], int]
"""By topic and partition: the offset of the next record."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """
    A Kafka cluster that a query reads from.

    Args:
        connection: librdkafka's options of a client, with addresses and secrets.
        places: The places of the sources that read from it among those of the query.
        sources: Number of the query's sources.
    """

    connection: Mapping[str, Any] = field(repr=False)
    places: tuple[int, ...]
    sources: int

    def positions(self, entry: str) -> Positions:
        """
        Return up to where the cluster's partitions were read; of a partition that two sources read, the lower offset.

        Args:
            entry: Spark's offsets entry. One in an unknown form, or of another number of sources, says nothing.
        """
        offsets = source_offsets(entry) or []
        if len(offsets) != self.sources:
            return {}
        found: dict[tuple[str, int], int] = {}
        for place in self.places:
            for topic, partition, offset in _partitions(offsets[place]):
                found[topic, partition] = min(offset, found.get((topic, partition), offset))
        return found


def clusters(sources: Sequence[tuple[str, Mapping[str, str]]], options: Mapping[str, str]) -> list[Cluster]:
    """
    Return the Kafka clusters that a query reads from.

    Args:
        sources: Name and options of the query's sources.
        options: Options of librdkafka that replace those of the sources. Any one of ``security.``, ``sasl.`` or
            ``ssl.`` replaces all of these.

    Raises:
        InvalidInputError: No source is Kafka's, or its options have no equivalent; says what to do.
    """
    places: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for place, (name, given) in enumerate(sources):
        if name == "kafka":
            connection = _connection({key.lower(): value for key, value in given.items()}, options)
            places.setdefault(tuple(sorted(connection.items())), []).append(place)
    if not places:
        raise InvalidInputError("the option consumerGroup needs a Kafka source, and the query has none: leave it out")
    return [Cluster(dict(connection), tuple(of_it), len(sources)) for connection, of_it in places.items()]


def _connection(given: Mapping[str, str], options: Mapping[str, str]) -> dict[str, Any]:
    servers = options.get("bootstrap.servers") or given.get("kafka.bootstrap.servers")
    if not servers:
        raise InvalidInputError("the brokers are unknown: set option('consumerGroup.bootstrap.servers', 'host:port')")
    if any(name.startswith(_SECURITY) for name in options):
        given = {name: value for name, value in given.items() if not name.removeprefix("kafka.").startswith(_SECURITY)}
    found = connection_options(servers, of_librdkafka(given, "use option('consumerGroup.<name>', …)"))
    return {**found, **options, "bootstrap.servers": servers}


def _partitions(offsets: Any) -> list[tuple[str, int, int]]:
    """Return topics, partitions and offsets; none if the value has not the form of Kafka's."""
    try:
        return [
            (topic, int(partition), offset)
            for topic, of_topic in (offsets or {}).items()
            for partition, offset in of_topic.items()
            if isinstance(offset, int) and offset >= 0
        ]
    except (AttributeError, ValueError):
        return []
