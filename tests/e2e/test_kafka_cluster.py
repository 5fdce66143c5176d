"""
Three brokers, of which one is killed while output is published to them: readers of committed records see no trace.

``make outages`` kills more often, with the brokers' own time-outs.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from pyspark.sql import SparkSession

from backend_client import ChangelogStateBackend
from backend_client.sinks.kafka import KafkaSink
from tests.e2e.kafka_query import KafkaQuery, SuspendedSink
from tools.servers.kafka import KafkaCluster

KILLS = int(os.environ.get("DSTL_KAFKA_KILLS", "2"))
QUICK = {"broker.session.timeout.ms": "3000", "broker.heartbeat.interval.ms": "500"} if KILLS <= 2 else {}
TOPIC = "totals"
COORDINATOR = "__transaction_state"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300 + 60 * KILLS)]


@pytest.fixture
def cluster() -> Iterator[KafkaCluster]:
    with KafkaCluster(settings=QUICK) as running:
        admin = AdminClient({"bootstrap.servers": running.servers})
        admin.create_topics([NewTopic(TOPIC, 1)])[TOPIC].result(30)
        yield running


def test_killed_broker_leaves_no_trace(
    spark: SparkSession,
    make_backend: Callable[..., ChangelogStateBackend],
    tmp_path: Path,
    cluster: KafkaCluster,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """
    I14: the coordinator of the transactions and the topic's leader are killed in turn, in the middle of a transaction.

    The query goes on by itself with the two others.
    """
    caplog.set_level(logging.WARNING, "backend_client")
    options = {"bootstrap.servers": cluster.servers, "log_level": 0}
    sink = SuspendedSink(KafkaSink(cluster.servers, TOPIC, {"compression.type": "none"}), tmp_path)
    with KafkaQuery(spark, make_backend(), tmp_path, sink, TOPIC, options, caplog) as query:
        query.add("a", "b", "wide")
        query.check()
        for led in islice(cycle([COORDINATOR, TOPIC]), KILLS):
            wait = sink.order()
            query.add("a", "b", "wide")
            pid = wait()
            victim = cluster.brokers[cluster.leader(led)]
            victim.stop(signal.SIGKILL)
            os.kill(pid, signal.SIGCONT)
            query.add("a", "c")
            query.check()
            victim.start()
            cluster.wait_for(3)
        assert query.query.isActive
