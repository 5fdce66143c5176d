"""Options of Spark's Kafka sink for librdkafka."""

from __future__ import annotations

import traceback
from typing import Any

import pyarrow as pa
import pytest

from backend_client.sinks.kafka import KafkaSink
from backend_client.sinks.kafka_options import check_names, connection_options, from_spark, producer_options
from backend_client.sinks.protocol import Slot
from storage.errors import InvalidInputError


def test_spark_options_become_those_of_librdkafka() -> None:
    """A query changes its guarantee, not its options."""
    jaas = 'org.apache.kafka.common.security.scram.ScramLoginModule required username="ann" password="a\\"b=\\\\c";'
    options = {
        "kafka.bootstrap.servers": "b:1",
        "topic": "t",
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "SCRAM-SHA-512",
        "kafka.sasl.jaas.config": jaas,
        "kafka.acks": "1",
        "includeHeaders": "true",
    }
    servers, topic, found = from_spark(options)
    assert (servers, topic) == ("b:1", "t")
    assert found == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "ann",
        "sasl.password": 'a"b=\\c',
    }
    sink = KafkaSink.from_spark_options(options)
    assert sink == KafkaSink("b:1", "t", found)
    assert "a\\" not in repr(sink)
    assert connection_options("b:1", found)["sasl.username"] == "ann"
    assert "partitioner" not in connection_options("b:1", found)
    assert producer_options("b:1", found)["partitioner"] == "murmur2_random"


@pytest.mark.parametrize(
    "options",
    [
        {"security.protocol": "s3cret"},
        {"security.protocol": "s3cret" * 100},
        {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "s3cret"},
        {"transaction.timeout.ms": "s3cret"},
        {"socket.timeout.ms": "s3cret"},
        {"batch.size": "s3cret"},
    ],
)
def test_errors_tell_no_value_of_an_option(options: dict[str, str]) -> None:
    """It may be the password, given to the wrong option; not even the cause tells it."""
    with pytest.raises(InvalidInputError, match="of the Kafka sink") as caught:
        KafkaSink("127.0.0.1:1", "t", options).check(pa.schema({"value": pa.string()}), [Slot("j", "u", "s", 0)])
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("name", ["enable.ssl.certificate.verification", "https.ca.location", "oauth_cb"])
def test_all_clients_of_a_sink_connect_alike(name: str) -> None:
    """The readers of markers and the checks get the same connection options as the producers."""
    assert connection_options("b:1", {name: "x"})[name] == "x"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topic": "t"}, "needs the option kafka.bootstrap.servers"),
        ({"kafka.bootstrap.servers": "b", "kafka.ssl.truststore.location": "t.jks"}, r"with ssl\.ca\.location"),
        ({"kafka.bootstrap.servers": "b", "kafka.sasl.jaas.config": "x required;"}, "has no username and password"),
    ],
)
def test_options_without_an_equivalent_are_refused(options: dict[str, str], message: str) -> None:
    """The error says what to use."""
    with pytest.raises(InvalidInputError, match=message):
        from_spark(options)


@pytest.mark.parametrize("name", ["transactional.id", "enable.idempotence", "acks"])
def test_options_that_the_sink_needs_are_its_own(name: str) -> None:
    """With others, records could be lost or doubled."""
    with pytest.raises(InvalidInputError, match=name):
        producer_options("b", {name: "x"})


@pytest.mark.parametrize(
    ("names", "what"),
    [
        ((["b:1", "c:1"], "t", None), "servers of KafkaSink must be a text, it is a list"),
        (("", "t", None), "addresses"),
        (("b:1", ["t"], None), "topic of KafkaSink must be a text, it is a list"),
        (("b:1", "a b", None), "the name 'a b'"),
        (("b:1", "", None), "the name ''"),
        (("b:1", None, "m\n"), r"the name 'm\\n' \(marker_topic of KafkaSink\): 1-249 characters"),
    ],
)
def test_names_that_cannot_be_are_told(names: tuple[Any, Any, Any], what: str) -> None:
    """Such a topic was to be created, and brokers that are no text were said not to answer."""
    with pytest.raises(InvalidInputError, match=what):
        check_names(*names)
    with pytest.raises(InvalidInputError, match=what):
        KafkaSink(names[0], names[1], marker_topic=names[2]).check(pa.schema({"value": pa.string()}), [])
    check_names("b:1,c:1", "t", None)
    check_names("b:1", None, "a.b_c-D")
