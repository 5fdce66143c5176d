"""Checks a cluster before the query takes its job over: topics, limits that forbid what is asked for, and rights."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient, ConfigResource  # type: ignore[attr-defined]

from backend_client.sinks.kafka.errors import ADVICE, TIMEOUT_LIMIT, ConnectionErrors
from backend_client.sinks.kafka.markers import partitions_of, replicas_of
from backend_client.sinks.kafka_options import refused
from storage.errors import InvalidInputError, UnavailableError

_TIMEOUT_S = 20.0
_NEW_TOPIC_S = 5.0
_BATCH_BYTES = 1_000_000
"""librdkafka's `batch.size`, unless it is set."""


class ClusterCheck:
    """
    Compares a sink's options with what the brokers allow. Limits that this user may not read are not compared.

    Args:
        connection: Options of any client.
        producer: Options of the sink's producers.
    """

    def __init__(self, connection: Mapping[str, Any], producer: Mapping[str, Any]) -> None:
        self._producer = producer
        self._errors = ConnectionErrors()
        try:
            options: dict[str, Any] = {**connection, "error_cb": self._errors}
            self._admin = AdminClient(options)
        except (KafkaException, TypeError, ValueError) as error:
            raise refused("the Kafka sink", error, connection) from None

    def transactions(self) -> None:
        """
        Check the transaction's time-out.

        Raises:
            InvalidInputError: It is above the brokers' limit; says both.
            UnavailableError: No broker answers.
        """
        timeout_ms = int(self._producer["transaction.timeout.ms"])
        try:
            broker = str(min(self._admin.list_topics(timeout=_TIMEOUT_S).brokers))
        except KafkaException as error:
            self._admin.poll(0)  # lets the client report events
            cause = self._errors.cause_of(error.args[0])
            advice = ADVICE.get(cause.code(), "check that they are up and reachable")
            raise UnavailableError(f"the Kafka brokers do not answer: {cause.str()}; {advice}") from error
        limit_ms = self._config(ConfigResource.Type.BROKER, broker).get(TIMEOUT_LIMIT)
        if limit_ms is not None and timeout_ms > int(limit_ms):
            raise InvalidInputError(
                f"transaction.timeout.ms is {timeout_ms}, and the brokers allow {limit_ms} ({TIMEOUT_LIMIT}): lower it"
            )

    def topic(self, name: str, *, has_keys: bool) -> None:
        """
        Check that a topic exists, may be written, and takes a whole batch.

        Args:
            name: The topic.
            has_keys: Whether records have keys.

        Raises:
            InvalidInputError: It does not; says what to do.
        """
        if partitions_of(self._admin, name) == 0:
            with suppress(KafkaException):  # a broker that creates topics on first use does so now
                self._admin.list_topics(name, timeout=_TIMEOUT_S)
        deadline = time.monotonic() + _NEW_TOPIC_S
        while partitions_of(self._admin, name) == 0:
            if time.monotonic() > deadline:
                raise InvalidInputError(
                    f"topic {name!r} does not exist for the sink's user, and the brokers do not create it: create it, "
                    "or allow the user to write to it"
                )
            time.sleep(0.05)
        self._check_rights(name, AclOperation.WRITE)
        config = self._config(ConfigResource.Type.TOPIC, name)
        if not has_keys and "compact" in config.get("cleanup.policy", ""):
            raise InvalidInputError(
                f"topic {name!r} has cleanup.policy={config['cleanup.policy']}, so it takes no record without a key, "
                "and the result has no column key: add it, or set the policy to delete"
            )
        batch_bytes = int(self._producer.get("batch.size", _BATCH_BYTES))
        limit_bytes = config.get("max.message.bytes")
        if limit_bytes is not None and batch_bytes > int(limit_bytes):
            raise InvalidInputError(
                f"batch.size of the sink is {batch_bytes} bytes, and topic {name!r} takes {limit_bytes} "
                f"(max.message.bytes): give the sink options={{'batch.size': {limit_bytes}}}, or raise the limit"
            )

    def marker_topic(self, name: str) -> None:
        """
        Check that markers are kept for ever, and may be written and read.

        Raises:
            InvalidInputError: They are not; says what to do.
        """
        policy = self._config(ConfigResource.Type.TOPIC, name).get("cleanup.policy")
        if policy is not None and policy.replace(" ", "") != "compact":
            raise InvalidInputError(
                f"the topic {name!r} of the sink's markers has cleanup.policy={policy}, which deletes markers, and "
                "output would be published twice: set it to compact"
            )
        self._check_rights(name, AclOperation.READ, AclOperation.WRITE)

    def replicas(self, markers: str, topic: str) -> None:
        """
        Check that markers are not lost before the records that they tell of.

        Raises:
            InvalidInputError: Their topic has fewer replicas.
        """
        with suppress(KafkaException):  # publishing tells
            topics = self._admin.list_topics(timeout=_TIMEOUT_S).topics
            less, more = (replicas_of(topics.get(name)) for name in (markers, topic))
            if 0 < less < more:  # a broker may not know a new topic yet
                raise InvalidInputError(
                    f"the topic {markers!r} of the sink's markers has {less} replicas, topic {topic!r} has {more}: "
                    "after a loss of markers output would be published twice. Give it as many "
                    "(kafka-reassign-partitions.sh)"
                )

    def _check_rights(self, topic: str, *needed: AclOperation) -> None:
        try:
            asked = self._admin.describe_topics(
                TopicCollection([topic]), include_authorized_operations=True, request_timeout=_TIMEOUT_S
            )
            allowed = asked[topic].result(_TIMEOUT_S).authorized_operations
        except (KafkaException, TimeoutError):
            return  # publishing tells
        missing = [operation.name for operation in needed if allowed and operation not in allowed]
        if missing:
            raise InvalidInputError(f"the sink's user may not {' and '.join(missing)} topic {topic!r}: allow it")

    def _config(self, kind: Any, name: str) -> dict[str, str]:
        try:
            asked = self._admin.describe_configs([ConfigResource(kind, name)], request_timeout=_TIMEOUT_S)
            entries = next(iter(asked.values())).result(_TIMEOUT_S)
        except (KafkaException, TimeoutError):
            return {}
        return {entry: config.value for entry, config in entries.items() if config.value is not None}
