"""Which offsets are committed where."""

from __future__ import annotations

import pytest

from backend_client.sources.kafka_positions import Cluster, clusters
from storage.errors import InvalidInputError

KAFKA = {"kafka.bootstrap.servers": "b:1", "subscribe": "in"}
JAAS = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="ann" password="secret";'


def test_sources_of_one_cluster_are_committed_together() -> None:
    """Sources of other kinds count, and of a partition that is read twice the lower offset."""
    sources = [("kafka", KAFKA), ("FileSource[x]", {}), ("kafka", {**KAFKA, "subscribe": "in,more"})]
    (found,) = clusters([*sources, ("dstl_idle_ticks", {})], {})
    assert found.places == (0, 2)
    entry = 'v1\n{}\n{"in":{"0":7,"1":3}}\n{"logOffset":2}\n{"in":{"0":5,"1":4},"more":{"0":9}}\n{"dstl_tick":1}'
    assert found.positions(entry) == {("in", 0): 5, ("in", 1): 3, ("more", 0): 9}


@pytest.mark.parametrize(
    "entry", ["", "v2\n{}\n{}", "v1\n{}\n-", 'v1\n{}\n{"in":{"0":7}}\n{"in":{"0":7}}', 'v1\n{}\n{"logOffset":2}']
)
def test_nothing_is_guessed(entry: str) -> None:
    """An entry in another form, of other sources, or of a source that was not read yet, says nothing."""
    assert Cluster({}, (0,), 1).positions(entry) == {}


def test_brokers_are_those_of_the_source() -> None:
    """Addresses and security come from the source's options, each cluster's from its own; none of it is shown."""
    secure = {**KAFKA, "kafka.security.protocol": "SASL_SSL", "kafka.sasl.jaas.config": JAAS, "kafka.fetch.min": "1"}
    first, second = clusters([("kafka", secure), ("kafka", {"kafka.bootstrap.servers": "c:1"})], {})
    assert first.connection["bootstrap.servers"] == "b:1"
    assert (first.connection["sasl.username"], first.connection["security.protocol"]) == ("ann", "SASL_SSL")
    assert "fetch.min" not in first.connection
    assert second.connection["bootstrap.servers"] == "c:1"
    assert "sasl.username" not in second.connection
    assert "secret" not in repr(first)


def test_options_of_the_group_win() -> None:
    """Key stores of Java are replaced by one option of security; then none of the source's counts."""
    java = {**KAFKA, "kafka.ssl.truststore.location": "t.jks", "kafka.security.protocol": "SSL"}
    with pytest.raises(InvalidInputError, match=r"use option\('consumerGroup.<name>', …\) with ssl\.ca\.location"):
        clusters([("kafka", java)], {})
    options = {"ssl.ca.location": "ca.pem", "bootstrap.servers": "d:1"}
    (found,) = clusters([("kafka", java)], options)
    assert found.connection["bootstrap.servers"] == "d:1"
    assert found.connection["ssl.ca.location"] == "ca.pem"
    assert "security.protocol" not in found.connection


@pytest.mark.parametrize(("name", "message"), [("rate", "needs a Kafka source"), ("kafka", "the brokers are unknown")])
def test_missing_brokers_are_refused(name: str, message: str) -> None:
    """The error says what to set or to leave out."""
    with pytest.raises(InvalidInputError, match=message):
        clusters([(name, {})], {})
