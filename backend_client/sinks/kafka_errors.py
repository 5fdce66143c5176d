"""Kafka's error codes: which of them fence a publisher, and what to do about the others."""
# ruff: noqa: SLF001 - the codes of librdkafka itself begin with an underscore

from __future__ import annotations

from confluent_kafka import KafkaError

TIMEOUT_LIMIT = "transaction.max.timeout.ms"
FENCED = frozenset({KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH})
PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})
END_OF_PARTITION = KafkaError._PARTITION_EOF

ADVICE: dict[int, str] = {
    KafkaError.MSG_SIZE_TOO_LARGE: (
        "a record is too large: raise max.message.bytes of the topic, and message.max.bytes of broker and sink"
    ),
    KafkaError.RECORD_LIST_TOO_LARGE: "raise max.message.bytes of the topic, or lower batch.size of the sink",
    KafkaError.UNKNOWN_TOPIC_OR_PART: "create the topic",
    KafkaError._UNKNOWN_TOPIC: "create the topic",
    KafkaError._UNKNOWN_PARTITION: "the column partition names one that the topic does not have",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "allow the sink's user to write to the topic",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: (
        "allow the sink's user its transactional ids, which begin with dstl-"
    ),
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "allow the sink's user idempotent writes",
    KafkaError.SASL_AUTHENTICATION_FAILED: "check user and password",
    KafkaError._AUTHENTICATION: "check user and password",
    KafkaError.INVALID_TXN_STATE: "the transaction timed out at the broker; raise transaction.timeout.ms",
    KafkaError.INVALID_TRANSACTION_TIMEOUT: f"lower transaction.timeout.ms, or raise {TIMEOUT_LIMIT} of the brokers",
    KafkaError._TIMED_OUT: "check that the brokers are up and reachable",
    KafkaError._ALL_BROKERS_DOWN: "check that the brokers are up and reachable",
    KafkaError._TRANSPORT: "check that the brokers are up and reachable",
    KafkaError._MSG_TIMED_OUT: "check that the brokers are up, and have space",
}
"""By code: what a user can do."""
