"""
Options of Spark's Kafka sink as those of librdkafka. No I/O.

Beside the sink's package, which needs the client: offsets of a source are read without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from backend_client.sinks.option_values import check_text, without_values
from storage.errors import InvalidInputError

_JAAS = re.compile(r"""(\w+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)')""")
_TOPIC = re.compile("[A-Za-z0-9._-]{1,249}")
_STORES = {
    "ssl.truststore.location": "ssl.ca.location (a PEM file)",
    "ssl.keystore.location": "ssl.certificate.location and ssl.key.location, or a PKCS#12 file",
    "ssl.truststore.type": "ssl.ca.location (a PEM file)",
}
_OWN = frozenset(
    {"bootstrap.servers", "transactional.id", "enable.idempotence", "acks", "key.serializer", "value.serializer"}
)
_SET_BY_SINK = (
    "transactional.id",
    "enable.idempotence",
    "acks",
    "request.required.acks",
    "delivery.report.only.error",
    "bootstrap.servers",
    "metadata.broker.list",
)
_OF_CONNECTION = (
    *("security.", "sasl.", "ssl.", "enable.sasl.", "enable.ssl.", "https.", "oauth_cb"),
    *("socket.", "client.", "debug", "broker.address.family"),
)
_NUMBERS = ("transaction.timeout.ms", "socket.timeout.ms", "batch.size")
"""Options that the sink computes with."""
_TOLD = ("bootstrap.servers", ".location", "client.id", "sasl.username")
"""Ends of the options whose values are names and places."""
_DEFAULTS: dict[str, Any] = {
    "partitioner": "murmur2_random",  # Java's default: other producers put a key into the same partition
    "linger.ms": 5,
    "compression.type": "lz4",
    "queue.buffering.max.kbytes": 65_536,
    "transaction.timeout.ms": 60_000,
    "reconnect.backoff.ms": 20,  # also twice the least time between the connections that a client begins
    "log_level": 0,  # errors are reported as exceptions
    "socket.timeout.ms": 10_000,
    "socket.connection.setup.timeout.ms": 10_000,
}


def check_names(servers: Any, topic: Any, marker_topic: Any) -> None:
    """Raise `InvalidInputError` if addresses are no text, or a topic cannot have such a name; None names no topic."""
    check_text("servers of KafkaSink", servers)
    if not servers:
        raise InvalidInputError("KafkaSink takes the brokers' addresses as 'host:port,host:port'")
    for what, name in (("topic", topic), ("marker_topic", marker_topic)):
        if name is None:
            continue
        check_text(f"{what} of KafkaSink", name)
        if not _TOPIC.fullmatch(name):
            raise InvalidInputError(
                f"no topic of Kafka has the name {name!r} ({what} of KafkaSink): 1-249 characters of [A-Za-z0-9._-]"
            )


def producer_options(servers: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return a producer's options without those of one slot.

    Raises:
        InvalidInputError: An option would break what the sink promises.
    """
    for name in _SET_BY_SINK:
        if name in options:
            raise InvalidInputError(f"the Kafka sink sets {name} itself; leave it out")
    for name in _NUMBERS:
        if re.fullmatch("[0-9]{1,10}", str(options.get(name, 0))) is None:
            raise InvalidInputError(f"the option {name} of the Kafka sink must be a whole number")
    return {**_DEFAULTS, "bootstrap.servers": servers, **options}


def connection_options(servers: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what any client of the brokers needs: address, security and time-outs."""
    chosen = {name: value for name, value in options.items() if name.startswith(_OF_CONNECTION)}
    times = {name: value for name, value in _DEFAULTS.items() if name.startswith(("socket.", "log_level"))}
    return {**times, "bootstrap.servers": servers, **chosen}


def refused(what: str, error: Exception, options: Mapping[str, Any]) -> InvalidInputError:
    """Return the error for options that librdkafka refuses, without their values; it has no cause that tells them."""
    told = without_values(str(error), options, is_told=lambda name: name.endswith(_TOLD))
    return InvalidInputError(f"the options of {what} are refused: {told}")


def from_spark(options: Mapping[str, str]) -> tuple[str, str | None, dict[str, Any]]:
    """
    Return address, topic and librdkafka's options for the options of Spark's Kafka sink.

    Raises:
        InvalidInputError: An option is missing, or librdkafka has no equivalent; says what to use.
    """
    given = {name.lower(): value for name, value in options.items()}
    servers = given.pop("kafka.bootstrap.servers", "")
    if not servers:
        raise InvalidInputError("format('kafka') needs the option kafka.bootstrap.servers: host:port of the brokers")
    topic = given.pop("topic", None)
    return servers, topic, of_librdkafka(given, "use sink(KafkaSink(…, options=…))")


def of_librdkafka(options: Mapping[str, str], instead: str) -> dict[str, Any]:
    """
    Return the options ``kafka.…`` of a source or sink of Spark as those of librdkafka.

    Args:
        options: The options; names are in lower case. Others than ``kafka.…`` are left out, as Spark does.
        instead: How the user gives options of librdkafka, for the error.

    Raises:
        InvalidInputError: librdkafka has no equivalent of one; says what to use.
    """
    found: dict[str, Any] = {}
    of_kafka = {name[6:]: value for name, value in options.items() if name.startswith("kafka.")}
    for name, value in of_kafka.items():
        if name in _STORES and not value.endswith((".p12", ".pfx")):
            raise InvalidInputError(
                f"librdkafka, which is used here, reads no Java key stores: instead of kafka.{name} {instead} with "
                f"{_STORES[name]}"
            )
        if name == "sasl.jaas.config":
            found |= _of_jaas(value, instead)
        elif name not in _OWN:
            found[name] = value
    return found


def _of_jaas(text: str, instead: str) -> dict[str, str]:
    pairs = {name: re.sub(r"\\(.)", r"\1", quoted or single) for name, quoted, single in _JAAS.findall(text)}
    if not {"username", "password"} <= pairs.keys():
        raise InvalidInputError(
            f"kafka.sasl.jaas.config has no username and password; {instead} with librdkafka's sasl options"
        )
    return {"sasl.username": pairs["username"], "sasl.password": pairs["password"]}
