"""Causes outside the query that keep Kafka from taking output: mended while the query runs, nothing is lost."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
)
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from backend_client import ChangelogStateBackend
from backend_client.sinks.kafka import KafkaSink
from tests.e2e.support import OUTPUT, Totals, read_input, write_input
from tests.support.kafka_reader import committed_values
from tests.waiting import wait_until
from tools.servers.kafka import KafkaBroker

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TOPIC = "totals"
WIDE = "wide"
WIDE_BYTES = 80_000
OPTIONS = {
    "batch.size": 50_000,
    "compression.type": "none",
    "topic.metadata.propagation.max.ms": 500,
}
FILES = [[("a", 1), ("b", 2)], [("a", 3), (WIDE, 1)], [("b", 4), ("c", 5)]]


@pytest.fixture
def broker() -> Iterator[KafkaBroker]:
    with KafkaBroker(settings={"auto.create.topics.enable": "false"}) as running:
        yield running


def test_query_goes_on_when_the_cause_is_mended(
    spark: SparkSession,
    make_backend: Callable[..., ChangelogStateBackend],
    tmp_path: Path,
    broker: KafkaBroker,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A record too large for the topic, and a topic that was deleted."""
    caplog.set_level(logging.WARNING, "backend_client")
    (tmp_path / "in").mkdir()
    admin = AdminClient({"bootstrap.servers": broker.servers})
    admin.create_topics([NewTopic(TOPIC, 1, config={"max.message.bytes": "50000"})])[TOPIC].result(10)
    result = make_backend().transform_with_state(
        read_input(spark, tmp_path / "in").groupBy("k"), Totals(), OUTPUT, "Update", "None"
    )
    padding = F.when(F.col("k") == WIDE, F.repeat(F.lit("x"), WIDE_BYTES)).otherwise("")
    records = result.select(F.col("k").alias("key"), F.concat("k", F.lit(" "), "n", padding).alias("value"))
    sink = KafkaSink(broker.servers, TOPIC, OPTIONS)
    query = (
        records.writeStream.sink(sink, slots=2, patience_s=30)
        .option("checkpointLocation", str(tmp_path / "chk"))
        .start()
    )

    def add_input(upto: int) -> None:
        write_input(tmp_path / "in", FILES[:upto])

    def wait_for_warning(text: str) -> None:
        wait_until(lambda: any(text in record.getMessage() for record in caplog.records))
        assert query.isActive

    def seen() -> Counter[str]:
        return Counter(value.decode().rstrip("x") for value in committed_values(broker.servers, TOPIC))

    try:
        add_input(1)
        query.processAllAvailable()
        assert seen() == Counter(["a 1", "b 1"])

        add_input(2)
        wait_for_warning("a record is too large: raise max.message.bytes of the topic")
        assert "wide 1" not in seen()
        entry = ConfigEntry("max.message.bytes", "200000", incremental_operation=AlterConfigOpType.SET)
        change = ConfigResource(ConfigResource.Type.TOPIC, TOPIC, incremental_configs=[entry])
        admin.incremental_alter_configs([change])[change].result(10)
        query.processAllAvailable()
        assert seen() == Counter(["a 1", "b 1", "a 2", "wide 1"])

        admin.delete_topics([TOPIC])[TOPIC].result(10)
        add_input(3)
        wait_for_warning("create the topic")
        admin.create_topics([NewTopic(TOPIC, 1)])[TOPIC].result(10)
        query.processAllAvailable()
        assert seen() == Counter(["b 2", "c 1"])
    finally:
        query.stop()
