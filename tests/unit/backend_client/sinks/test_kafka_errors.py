"""A publisher's errors, by those of its Kafka client."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from backend_client.sinks.kafka.errors import FENCED, fatal_cause

# Codes of librdkafka: _FATAL, _FENCED, _TIMED_OUT.
GIVEN_UP = KafkaError(-150, "Unable to produce message")
CAUSE = KafkaError(-144, "fenced by newer producer instance", True)
AWAY = KafkaError(-185, "nobody answers")


class Client:
    """A client that tells of its end in its next event, when its transaction is aborted, or never."""

    def __init__(self, event: KafkaError | None, transaction: KafkaError | None) -> None:
        self._event = event
        self._transaction = transaction

    def poll(self, timeout: float, /) -> object:
        """Tell the event."""
        if self._event is not None:
            raise KafkaException(self._event)
        return 0

    def abort_transaction(self, timeout: float, /) -> object:
        """Tell the transaction's error."""
        if self._transaction is not None:
            raise KafkaException(self._transaction)
        return None


def cause_of(client: Any, error: KafkaError) -> KafkaError:
    """Return what a client's error says."""
    return fatal_cause(client, error)


@pytest.mark.parametrize(("event", "transaction"), [(CAUSE, None), (None, CAUSE), (GIVEN_UP, CAUSE), (CAUSE, GIVEN_UP)])
def test_fenced_publisher_that_writes_on_is_fenced(event: KafkaError | None, transaction: KafkaError | None) -> None:
    """A record that comes after the refusal fails without a reason, but the client knows it."""
    assert cause_of(Client(event, transaction), GIVEN_UP).code() in FENCED


def test_other_errors_stay_as_they_are() -> None:
    """A client that has not given up is asked for nothing; one that tells nothing has its own error."""
    assert cause_of(Client(CAUSE, CAUSE), AWAY) is AWAY
    assert cause_of(Client(None, None), GIVEN_UP) is GIVEN_UP
    assert cause_of(Client(GIVEN_UP, GIVEN_UP), GIVEN_UP) is GIVEN_UP
