"""Kafka's error codes: which of them fence a publisher, and what to do about the others."""
# ruff: noqa: SLF001 - the codes of librdkafka itself begin with an underscore

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import KafkaError, KafkaException, Producer

TIMEOUT_LIMIT = "transaction.max.timeout.ms"
FENCED = frozenset({KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH})
PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})
END_OF_PARTITION = KafkaError._PARTITION_EOF
_NO_ANSWER = frozenset(
    {KafkaError._TIMED_OUT, KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._MSG_TIMED_OUT}
)
_REFUSED = frozenset({KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._SSL})

ADVICE: dict[int, str] = {
    KafkaError.MSG_SIZE_TOO_LARGE: (
        "a record is too large: raise max.message.bytes of the topic, and message.max.bytes of broker and sink"
    ),
    KafkaError.RECORD_LIST_TOO_LARGE: "raise max.message.bytes of the topic, or lower batch.size of the sink",
    KafkaError.UNKNOWN_TOPIC_OR_PART: "create the topic",
    KafkaError._UNKNOWN_TOPIC: "create the topic",
    KafkaError.TOPIC_EXCEPTION: "no topic has such a name: change the column topic in the query",
    KafkaError._UNKNOWN_PARTITION: "the column partition names one that the topic does not have",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "allow the sink's user to write to the topic",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: (
        "allow the sink's user its transactional ids, which begin with dstl-"
    ),
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "allow the sink's user idempotent writes",
    KafkaError.SASL_AUTHENTICATION_FAILED: "check user and password",
    KafkaError._AUTHENTICATION: "check user and password",
    KafkaError._SSL: "check the certificates",
    KafkaError.INVALID_TXN_STATE: "the transaction timed out at the broker; raise transaction.timeout.ms",
    KafkaError.INVALID_TRANSACTION_TIMEOUT: f"lower transaction.timeout.ms, or raise {TIMEOUT_LIMIT} of the brokers",
    KafkaError.INVALID_TIMESTAMP: "set the executors' clocks, or raise message.timestamp.after.max.ms of the topic",
    KafkaError.INVALID_RECORD: (
        "the topic does not take a record: one with cleanup.policy=compact takes none whose key is null"
    ),
    KafkaError.NOT_ENOUGH_REPLICAS: "too few brokers have the partition: check that all are up, and have space",
    KafkaError.KAFKA_STORAGE_ERROR: "check the disks of the brokers",
    **dict.fromkeys(_NO_ANSWER, "check that the brokers are up and reachable, and have space"),
}
"""By code: what a user can do."""


class ConnectionErrors:
    """Remembers why a client was refused by a broker: its calls only say that there was no answer."""

    def __init__(self) -> None:
        self._refusal: KafkaError | None = None

    def __call__(self, error: KafkaError) -> None:
        """Take note of an event of the client (`error_cb`)."""
        if error.code() in _REFUSED:
            self._refusal = error

    def cause_of(self, error: KafkaError) -> KafkaError:
        """Return the refusal if an error says only that there was no answer."""
        return self._refusal if self._refusal is not None and error.code() in _NO_ANSWER else error


@contextmanager
def fatal_errors() -> Iterator[None]:
    """Raise a client's fatal error as such: the client then calls a callback, and Python tells a `SystemError` only."""
    try:
        yield
    except SystemError as error:
        raise KafkaException(KafkaError(KafkaError._FATAL)) from error


def fatal_cause(client: Producer, error: KafkaError) -> KafkaError:
    """
    Return why a client gave up for good, where an error says only that it has.

    A call that comes after the client's own thread was refused has no reason in its error; the client's next event
    has it, and so has the error of its transaction.
    """
    if error.code() == KafkaError._FATAL:
        for ask in (client.poll, client.abort_transaction):
            try:
                ask(0)
            except KafkaException as told:
                if told.args[0].code() != KafkaError._FATAL:
                    reason: KafkaError = told.args[0]
                    return reason
    return error
