"""
Publishes to Kafka: one transaction per slot and checkpoint, with the marker among its records.

Readers with ``isolation.level=read_committed`` see each record once, those of a slot in order. A slot's
``transactional.id`` belongs to the slot and never to a host: opening the slot elsewhere fences the publisher before.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from backend_client.sinks.kafka.check import ClusterCheck
from backend_client.sinks.kafka.errors import ADVICE, FENCED, PURGED, ConnectionErrors, fatal_cause, fatal_errors
from backend_client.sinks.kafka.markers import Newest, ensure_topic, newest_marker
from backend_client.sinks.kafka_options import check_names, connection_options, from_spark, producer_options, refused
from backend_client.sinks.protocol import Marker, Sink, Slot, SlotPublisher
from storage.errors import FencedError, InvalidInputError, UnavailableError

_FULL_QUEUE_S = 60.0
_COLUMNS = {"value", "key", "topic", "partition", "headers"}
_BYTES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)


@dataclass(frozen=True, slots=True)
class KafkaSink(Sink):
    """
    A Kafka cluster.

    Output columns are those of Spark's Kafka sink: `value`, and optionally `key`, `topic`, `partition` and `headers`.

    Args:
        servers: Addresses of the brokers, ``host:port``, separated by commas.
        topic: The topic of all records; None if the column `topic` says it.
        options: Options of librdkafka, for example of SASL and TLS. Secrets among them are sent to the tasks.
        marker_topic: The topic of the sink's markers; by default ``<job>.<sink>.markers``.
    """

    servers: str
    topic: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    marker_topic: str | None = None

    @classmethod
    def from_spark_options(cls, options: Mapping[str, str]) -> Self:
        """
        Return the sink for the options of Spark's own Kafka sink.

        Raises:
            InvalidInputError: An option is missing or has no equivalent.
        """
        return cls(*from_spark(options))

    def check(self, columns: pa.Schema, slots: Sequence[Slot]) -> None:
        """Check columns, topics, limits and rights; create the topic of the markers."""
        check_names(self.servers, self.topic, self.marker_topic)
        _check_columns(columns, self.topic)
        connection = connection_options(self.servers, self.options)
        check = ClusterCheck(connection, producer_options(self.servers, self.options))
        check.transactions()
        if self.topic is not None:
            check.topic(self.topic, has_keys="key" in columns.names)
        markers = self._marker_topic(slots[0])
        if markers == self.topic:
            raise InvalidInputError(f"topic {markers!r} cannot have the sink's markers, too: readers would see them")
        ensure_topic(connection, markers, len(slots), self.topic)
        check.marker_topic(markers)
        if self.topic is not None:
            check.replicas(markers, self.topic)
        self._check_transactional_id(slots[0])

    def open(self, slot: Slot) -> SlotPublisher:
        """Open a slot; the brokers abort its previous publisher's open transaction, and refuse that publisher."""
        try:
            return self._open(slot, f"{_transactional_prefix(slot)}-{slot.number}")
        except InvalidInputError as error:  # the check took them: what they name is missing on this host
            raise UnavailableError(f"on this host {error}") from error

    def _open(self, slot: Slot, transactional_id: str) -> _KafkaPublisher:
        options = {**producer_options(self.servers, self.options), "transactional.id": transactional_id}
        return _KafkaPublisher(self, slot, options, self._marker_topic(slot))

    def _check_transactional_id(self, slot: Slot) -> None:
        """Open a producer with an id of its own: a slot's would fence the query that may still run."""
        self._open(slot, f"{_transactional_prefix(slot)}-check").close()

    def _marker_topic(self, slot: Slot) -> str:
        return self.marker_topic or f"{slot.job}.{slot.sink}.markers"


class _KafkaPublisher(SlotPublisher):
    def __init__(self, sink: KafkaSink, slot: Slot, options: Mapping[str, Any], marker_topic: str) -> None:
        self._sink = sink
        self._slot = slot
        self._marker_topic = marker_topic
        self._refused: KafkaError | None = None
        self._refused_topic: str | None = None
        self._read: Newest | None = None
        self._place: int | None = None
        self._connection_errors = ConnectionErrors()
        self._timeout_s = 2 * float(options["socket.timeout.ms"]) / 1000
        self._transaction_s = float(options["transaction.timeout.ms"]) / 1000
        callbacks = {"on_delivery": self._delivered, "error_cb": self._connection_errors}
        try:
            self._producer = Producer({**options, **callbacks})
        except (KafkaException, TypeError, ValueError) as error:
            raise refused("the Kafka sink", error, options) from None
        try:
            self._connect()
            self._producer.init_transactions(self._timeout_s)
        except KafkaException as error:
            raise self._translated(error) from error

    def last_published(self) -> Marker | None:
        """Read the last record of the slot's partition among the markers."""
        self._read = self._newest()
        return self._read.marker

    def publish(self, records: Iterable[pa.RecordBatch], marker: Marker) -> int:
        """Produce records and marker in one transaction."""
        producer, count = self._producer, 0
        try:
            producer.begin_transaction()
            for batch in records:
                for topic, message in _messages(batch, self._sink.topic):
                    if topic == self._marker_topic:
                        raise UnavailableError(f"the column topic names {topic!r}, the topic of the sink's markers")
                    self._produce(topic, **message)
                    count += 1
                if self._refused is not None:
                    raise KafkaException(self._refused)
            key, value = self._slot.job_uid.encode(), marker.to_text().encode()
            place = {"partition": self._slot.number, "on_delivery": self._placed}
            self._produce(self._marker_topic, key=key, value=value, **place)
            self._check_newest()
            self._commit()
        except KafkaException as error:
            self._abort()
            raise self._translated(error) from error
        except BaseException:
            self._abort()
            raise
        self._read = None  # another publisher would have fenced this one
        return count

    def close(self) -> None:
        """Drop what is not sent, and close the connections."""
        with suppress(KafkaException):
            self._producer.purge()
            self._producer.flush(0)

    def _connect(self) -> None:
        """
        Wait for a connection to a broker of the cluster.

        A producer without one when it asks for its id asks again after half a second. The answer to the first request
        may come over a connection to the address of the options, which the client gives up when it knows the brokers.
        """
        for _ in range(2):
            self._producer.list_topics(self._sink.topic or self._marker_topic, self._timeout_s)

    def _produce(self, topic: str, **message: Any) -> None:
        deadline = 0.0
        while True:
            try:
                return self._producer.produce(topic, **message)
            except OverflowError as error:
                raise UnavailableError(
                    f"the column partition has {message['partition']}, which no topic has"
                ) from error
            except KafkaException:
                self._refused_topic = topic
                raise
            except BufferError as error:  # the queue is full: wait until some of it is sent
                with fatal_errors():
                    self._producer.poll(0.1)
                deadline = deadline or time.monotonic() + _FULL_QUEUE_S
                if self._refused is not None:
                    raise KafkaException(self._refused) from error
                if time.monotonic() > deadline:
                    raise UnavailableError(
                        f"the brokers took none of the records of slot {self._slot.number} for {_FULL_QUEUE_S:g} s: "
                        "check that they are up and have space"
                    ) from error

    def _newest(self, until: int | None = None) -> Newest:
        connection = connection_options(self._sink.servers, self._sink.options)
        return newest_marker(connection, self._marker_topic, self._slot, until)

    def _check_newest(self) -> None:
        """
        Check that nothing was published after the marker that was read, now that the brokers have the next one.

        A broker that the others do not reach takes itself for the leader of its partitions, and tells readers an end
        from before that. No new marker is acknowledged by it: other brokers must have that, behind all former ones.
        """
        with fatal_errors():
            left = self._producer.flush(self._transaction_s)
        if left:
            raise UnavailableError(
                f"the brokers did not take all records of slot {self._slot.number} within {self._transaction_s:g} s "
                "(transaction.timeout.ms): check that they are up and have space"
            )
        read, place = self._read, self._place
        if read is None or place in (None, read.end):  # if it has no place, the commit tells why
            return
        if place < 0 or self._newest(place).marker != read.marker:
            raise UnavailableError(
                f"a broker told an old marker of slot {self._slot.number} from topic {self._marker_topic!r}: it does "
                "not know that another one leads the partition now. Nothing was published; check its network"
            )

    def _commit(self) -> None:
        deadline = time.monotonic() + self._transaction_s
        while True:
            try:
                return self._producer.commit_transaction(self._timeout_s)
            except KafkaException as error:
                if not error.args[0].retriable() or time.monotonic() > deadline:
                    raise

    def _abort(self) -> None:
        # Without success it times out at the broker, or the next publisher of the slot aborts it.
        with suppress(KafkaException):
            self._producer.purge()
            self._producer.abort_transaction(self._timeout_s)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None and self._refused is None and error.code() not in PURGED:
            self._refused, self._refused_topic = error, message.topic()

    def _placed(self, error: KafkaError | None, message: Message) -> None:
        self._delivered(error, message)
        if error is None:
            offset = message.offset()
            self._place = -1 if offset is None else offset  # a broker may not tell it when it was asked twice

    def _translated(self, error: KafkaException) -> Exception:
        cause = fatal_cause(self._producer, error.args[0])
        if cause.code() in FENCED:
            return FencedError(
                f"slot {self._slot.number} of sink {self._slot.sink!r} was opened by another publisher, or its "
                "transaction timed out at the broker (transaction.timeout.ms)"
            )
        with suppress(KafkaException):
            self._producer.poll(0)  # lets the client report events
        cause = self._connection_errors.cause_of(self._refused if self._refused is not None else cause)
        advice = ADVICE.get(cause.code(), "check the brokers; publishing is retried")
        topic = self._refused_topic or self._sink.topic or "(column topic)"
        return UnavailableError(f"Kafka refused output for topic {topic!r}: {cause.str()}; {advice}")


def _messages(batch: pa.RecordBatch, topic: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row's topic and message."""
    lists = {name: _values(name, batch.column(name)) for name in _COLUMNS.intersection(batch.schema.names)}
    if "headers" in lists:
        lists["headers"] = [None if row is None else [_header(item) for item in row] for row in lists["headers"]]
    topics = lists.pop("topic", None)
    partitions = lists.pop("partition", None)
    keys = tuple(lists)
    for number, values in enumerate(zip(*lists.values(), strict=True)):
        message = dict(zip(keys, values, strict=True))
        if partitions is not None and partitions[number] is not None:
            message["partition"] = _partition(partitions[number])
        target = topic if topic is not None else topics[number] if topics is not None else None
        if target is None:
            raise UnavailableError("a row has no topic: its column topic is null, and the sink names none")
        if "\0" in target:
            raise UnavailableError(f"a row has the topic {target!r}, and no topic's name has the character NUL (0x00)")
        yield target, message


def _values(name: str, column: pa.Array) -> list[Any]:
    try:
        values: list[Any] = (_as_bytes(column) if name in ("value", "key") else column).to_pylist()
    except UnicodeDecodeError as error:
        raise UnavailableError(
            f"the column {name} has text that is not UTF-8: {error}; change it in the query"
        ) from error
    return values


def _partition(number: int) -> int:
    """Return a partition's number. The client takes -1 for none, and chooses a partition itself."""
    if number < 0:
        raise UnavailableError(f"the column partition has {number}, which no topic has")
    return number


def _header(item: Mapping[str, Any] | None) -> tuple[str, bytes | None]:
    if item is None or item["key"] is None:
        raise UnavailableError("a row has a header without a key, which Kafka does not take")
    if "\0" in item["key"]:
        # The client would silently cut the key off there.
        raise UnavailableError(
            f"a row has a header whose key {item['key']!r} has the character NUL (0x00), which the client does not "
            "write; remove it in the query"
        )
    value = item["value"]
    # Text would be cut off likewise; bytes are not.
    return item["key"], value.encode() if isinstance(value, str) else value


def _as_bytes(column: pa.Array) -> pa.Array:
    return pc.cast(column, pa.large_binary() if column.type in (pa.large_string(), pa.large_binary()) else pa.binary())


def _check_columns(columns: pa.Schema, topic: str | None) -> None:
    found = {name: columns.field(name).type for name in columns.names}
    unknown = sorted(found.keys() - _COLUMNS)
    if "value" not in found or unknown:
        raise InvalidInputError(
            f"a Kafka record has the column value and optionally {', '.join(sorted(_COLUMNS - {'value'}))}; the result "
            f"has {', '.join(columns.names)}: select them, for example with to_json(struct('*')) as value"
        )
    for name in ("value", "key"):
        if name in found and not any(fits(found[name]) for fits in _BYTES):
            raise InvalidInputError(f"column {name} must be a string or binary, it is {found[name]}: cast it")
    if "topic" in found and not any(fits(found["topic"]) for fits in _BYTES[:2]):
        raise InvalidInputError(f"column topic must be a string, it is {found['topic']}: cast it")
    if "partition" in found and not pa.types.is_integer(found["partition"]):
        raise InvalidInputError(f"column partition must be an int, it is {found['partition']}: cast it")
    if "headers" in found and not _are_headers(found["headers"]):
        raise InvalidInputError(
            f"column headers must be an array<struct<key: string, value: binary>>, it is {found['headers']}: cast it"
        )
    if topic is None and "topic" not in found:
        raise InvalidInputError("the Kafka sink needs a topic: KafkaSink(…, topic=…), option('topic', …), or a column")


def _are_headers(given: pa.DataType) -> bool:
    if not (pa.types.is_list(given) or pa.types.is_large_list(given)) or not pa.types.is_struct(given.value_type):
        return False
    found = {of.name: of.type for of in given.value_type}
    return (
        found.keys() == {"key", "value"}
        and any(fits(found["key"]) for fits in _BYTES[:2])
        and any(fits(found["value"]) for fits in _BYTES)
    )


def _transactional_prefix(slot: Slot) -> str:
    return f"dstl-{slot.job_uid or slot.job}-{slot.sink}"
