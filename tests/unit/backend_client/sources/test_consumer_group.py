"""Answers of a coordinator that moves, by the mock cluster of librdkafka; the rest is an integration test."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, Producer

from backend_client.sources.consumer_group import ConsumerGroup
from storage.errors import UnavailableError
from tests.support.kafka_reader import committed_offsets

Refuse = Callable[[int], None]
_OFFSET_FETCH = 9


@pytest.fixture
def cluster() -> Iterator[tuple[str, Refuse]]:
    """The address of a mock cluster, and a function that makes it refuse the next request for a group's offsets."""
    Producer({})  # loads the library
    loaded = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "librdkafka" in line]
    library = ctypes.CDLL(loaded[0])
    for name in ("conf_new", "new", "mock_cluster_new"):
        getattr(library, f"rd_kafka_{name}").restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    options = ctypes.c_void_p(library.rd_kafka_conf_new())
    owner = ctypes.c_void_p(library.rd_kafka_new(0, options, None, ctypes.c_size_t(0)))
    mock = ctypes.c_void_p(library.rd_kafka_mock_cluster_new(owner, 1))
    library.rd_kafka_mock_topic_create(mock, b"in", 1, 1)

    def refuse(code: int) -> None:
        errors = (ctypes.c_int * 1)(code)
        count = ctypes.c_size_t(1)
        library.rd_kafka_mock_push_request_errors_array(mock, ctypes.c_int16(_OFFSET_FETCH), count, errors)

    yield library.rd_kafka_mock_cluster_bootstraps(mock).decode(), refuse
    library.rd_kafka_mock_cluster_destroy(mock)


@pytest.mark.parametrize("code", [KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.NOT_COORDINATOR])
def test_coordinator_moves(cluster: tuple[str, Refuse], code: int) -> None:
    """It is an error, after which offsets are committed; librdkafka's list of a group's offsets ends the process."""
    servers, refuse = cluster
    group = ConsumerGroup("g", {"bootstrap.servers": servers, "log_level": 0}, "job")
    refuse(code)
    with pytest.raises(UnavailableError, match=r"consumer group 'g' takes no offsets: .*oordinator"):
        group.commit({("in", 0): 5}, 0)
    group.commit({("in", 0): 5}, 0)
    assert committed_offsets(servers, "g") == {("in", 0): 5}
