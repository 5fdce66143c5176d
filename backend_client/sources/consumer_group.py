"""
A consumer group that shows how far a query has read; no consumer uses it.

Each offset is committed with a note that names the job and the checkpoint. So a group that has foreign offsets is
recognised, and left alone: its consumers would lose or repeat records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from backend_client.sinks.kafka.errors import ConnectionErrors
from backend_client.sinks.kafka_options import refused
from backend_client.sources.kafka_positions import Positions
from storage.errors import ConflictError, UnavailableError

_TIMEOUT_S = 10.0
_MEMBERS = "it has active members: name a group that no consumer uses"
_ADVICE = {
    KafkaError.GROUP_AUTHORIZATION_FAILED: "allow the user to READ the group",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "allow the user to READ the topic",
    KafkaError.UNKNOWN_MEMBER_ID: _MEMBERS,
    KafkaError.ILLEGAL_GENERATION: _MEMBERS,
    KafkaError.REBALANCE_IN_PROGRESS: _MEMBERS,
    KafkaError.UNKNOWN_TOPIC_OR_PART: "the topic no longer exists",
    KafkaError.SASL_AUTHENTICATION_FAILED: "check user and password",
    KafkaError._AUTHENTICATION: "check user and password",  # noqa: SLF001 - a code of librdkafka
    KafkaError._SSL: "check the certificates",  # noqa: SLF001 - a code of librdkafka
}
_T = TypeVar("_T")


class ConsumerGroup:
    """
    One group at one cluster. Not thread-safe.

    Args:
        name: Name of the group.
        connection: librdkafka's options of a client.
        job: The job whose offsets are committed.

    Raises:
        InvalidInputError: An option is refused by librdkafka.
    """

    def __init__(self, name: str, connection: Mapping[str, Any], job: str) -> None:
        self._name = name
        self._note = f"dstl {job} "
        self._own: set[tuple[str, int]] = set()
        self._errors = ConnectionErrors()
        self._connection: dict[str, Any] = {**connection, "error_cb": self._errors}
        try:
            self._admin = AdminClient(self._connection)
        except (KafkaException, TypeError, ValueError) as error:
            raise refused(f"consumer group {name!r}", error, connection) from None

    def commit(self, positions: Positions, checkpoint_id: int) -> None:
        """
        Commit offsets, also lower ones than before.

        Raises:
            ConflictError: The group has offsets of another consumer or job for these partitions.
            UnavailableError: The brokers do not answer, or refuse; says why. Some partitions may be committed.
        """
        if not positions.keys() <= self._own:
            self._check_own(positions.keys())
        note = f"{self._note}{checkpoint_id}"
        wanted = [TopicPartition(*place, offset, metadata=note) for place, offset in sorted(positions.items())]
        request = [ConsumerGroupTopicPartitions(self._name, wanted)]
        try:
            answer = self._answer(self._admin.alter_consumer_group_offsets(request, request_timeout=_TIMEOUT_S))
            self._raise_first(answer.topic_partitions)
        except UnavailableError:
            self._own.clear()  # members may have come, and leave offsets of their own
            raise

    def _check_own(self, places: Iterable[tuple[str, int]]) -> None:
        """Look for offsets of others, as a consumer: librdkafka's other way to ask crashes if the coordinator moves."""
        consumer = Consumer({**self._connection, "group.id": self._name, "enable.auto.commit": False})
        try:
            found = consumer.committed([TopicPartition(*place) for place in sorted(places)], timeout=_TIMEOUT_S)
        except KafkaException as error:
            raise self._refused(_cause(consumer, error.args[0])) from error
        finally:
            consumer.close()
        self._raise_first(found)
        for partition in found:
            if partition.offset >= 0 and not str(partition.metadata or "").startswith(self._note):
                raise ConflictError(
                    f"consumer group {self._name!r} has offsets that another consumer committed, for example of topic "
                    f"{partition.topic!r}: name an unused group, or delete this one"
                )
        self._own.update(places)

    def _answer(self, asked: Mapping[str, Future[_T]]) -> _T:
        try:
            return next(iter(asked.values())).result(2 * _TIMEOUT_S)
        except (KafkaException, TimeoutError) as error:
            cause = error.args[0] if isinstance(error, KafkaException) else KafkaError(KafkaError.REQUEST_TIMED_OUT)
            raise self._refused(cause) from error

    def _raise_first(self, found: Sequence[TopicPartition]) -> None:
        for partition in found:
            if partition.error is not None:
                raise self._refused(partition.error, f" of topic {partition.topic!r}")

    def _refused(self, error: KafkaError, place: str = "") -> UnavailableError:
        with suppress(KafkaException):
            self._admin.poll(0)  # lets the client report events
        cause = self._errors.cause_of(error)
        advice = _ADVICE.get(cause.code(), "check that the brokers are up and reachable")
        return UnavailableError(f"consumer group {self._name!r} takes no offsets{place}: {cause.str()}; {advice}")


def _cause(consumer: Consumer, error: KafkaError) -> KafkaError:
    """Return why there was no answer: a missing right is an event of the consumer, and its call waits on."""
    event = consumer.poll(0)
    told = None if event is None else event.error()
    return told if told is not None and error.code() == KafkaError._TIMED_OUT else error  # noqa: SLF001 - a code
