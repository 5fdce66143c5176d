"""The systems to which the test publishes: how each is started, written to, and read by a reader of committed data."""

from __future__ import annotations

import json
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from psycopg.rows import dict_row

from backend_client.sinks.delta import DeltaSink
from backend_client.sinks.kafka import KafkaSink
from backend_client.sinks.parquet import ParquetSink
from backend_client.sinks.postgres import PostgresSink
from backend_client.sinks.protocol import Sink
from tools.servers.kafka import KafkaBroker
from tools.servers.postgres import PostgresServer
from tools.servers.s3_server import S3Server
from tools.servers.sqlite_sink import SqliteSink

Records = list[dict[str, Any]]


class System(ABC):
    """One system; a context of `servers` holds what it starts."""

    name: str
    keeps_order = True
    """Whether a reader sees the records in the order in which they were published."""

    def __init__(self, folder: Path, servers: ExitStack) -> None:
        self.folder = folder
        self.servers = servers

    @property
    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """The arguments of `sink`, as JSON."""

    @staticmethod
    @abstractmethod
    def sink(parameters: Mapping[str, Any]) -> Sink:
        """Return the sink."""

    @abstractmethod
    def records(self) -> Records:
        """Return the records that a reader of committed data sees, those of each key in order."""

    def restart(self) -> bool:
        """Kill the system's server and start it again; return false if it has none."""
        return False


class Sqlite(System):
    """A table in a file: the protocol without a server."""

    name = "sqlite"

    @property
    def parameters(self) -> dict[str, Any]:
        """The file."""
        return {"path": str(self.folder / "out.db")}

    @staticmethod
    def sink(parameters: Mapping[str, Any]) -> Sink:
        """Return the sink."""
        return SqliteSink(**parameters)

    def records(self) -> Records:
        """Read the table."""
        return SqliteSink(**self.parameters).records()


class Kafka(System):
    """A topic of two partitions at a broker of its own."""

    name = "kafka"

    def __init__(self, folder: Path, servers: ExitStack) -> None:
        super().__init__(folder, servers)
        self._broker = servers.enter_context(KafkaBroker(partitions=2))

    @property
    def parameters(self) -> dict[str, Any]:
        """Address and topic."""
        return {"servers": self._broker.servers, "topic": "out"}

    @staticmethod
    def sink(parameters: Mapping[str, Any]) -> Sink:
        """Return the sink."""
        return KafkaSink(**parameters)

    def records(self) -> Records:
        """Read both partitions to their ends, committed records only."""
        consumer = Consumer(
            {
                "bootstrap.servers": self._broker.servers,
                "group.id": "reader",
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
            }
        )
        consumer.assign([TopicPartition("out", number, OFFSET_BEGINNING) for number in (0, 1)])
        found, ended = Records(), set[int]()
        while len(ended) < 2:
            message = consumer.poll(30)
            if message is None:
                raise TimeoutError("the broker gives no records")
            if message.error() is not None:
                ended.add(message.partition() or 0)
            else:
                found.append(json.loads(message.value() or b""))
        consumer.close()
        return found

    def restart(self) -> bool:
        """Kill the broker and start it again."""
        self._broker.stop(signal.SIGKILL)
        self._broker.start()
        return True


class Postgres(System):
    """A table at a server of its own."""

    name = "postgres"

    def __init__(self, folder: Path, servers: ExitStack) -> None:
        super().__init__(folder, servers)
        self._server = servers.enter_context(PostgresServer())
        with psycopg.connect(self._server.conninfo) as connection:
            connection.execute(
                "create table out (number bigserial, k text, n bigint, s bigint, before bigint, now bigint)"
            )

    @property
    def parameters(self) -> dict[str, Any]:
        """Address and table."""
        return {"conninfo": self._server.conninfo, "table": "out"}

    @staticmethod
    def sink(parameters: Mapping[str, Any]) -> Sink:
        """Return the sink."""
        return PostgresSink(**parameters)

    def records(self) -> Records:
        """Read the table."""
        with psycopg.connect(self._server.conninfo, row_factory=dict_row) as connection:
            return connection.execute("select * from out order by number").fetchall()

    def restart(self) -> bool:
        """Crash the server and start it again."""
        self._server.stop(signal.SIGQUIT)
        self._server.start()
        return True


class Parquet(System):
    """A folder of files on a disk."""

    name = "parquet"
    keeps_order = False

    @property
    def parameters(self) -> dict[str, Any]:
        """The folder."""
        return {"path": f"file://{self.folder}/out"}

    @staticmethod
    def sink(parameters: Mapping[str, Any]) -> Sink:
        """Return the sink."""
        return ParquetSink(**parameters)

    def records(self) -> Records:
        """Read all files that a listing shows."""
        files = sorted((self.folder / "out").glob("*.parquet"))
        return [record for path in files for record in pq.read_table(path).to_pylist()]


class Delta(System):
    """A table of Delta Lake on an S3 server of its own."""

    name = "delta"
    keeps_order = False

    def __init__(self, folder: Path, servers: ExitStack) -> None:
        super().__init__(folder, servers)
        self._server = servers.enter_context(S3Server())
        self._server.create_bucket("bucket")

    @property
    def parameters(self) -> dict[str, Any]:
        """Place and address of the table; the user's secrets are those of a test."""
        server = self._server
        options = {"aws_access_key_id": server.access_key, "aws_secret_access_key": server.secret_key}
        options |= {"aws_endpoint_url": server.endpoint_url, "aws_region": server.region}
        return {"path": "s3://bucket/out", "storage_options": options}

    @staticmethod
    def sink(parameters: Mapping[str, Any]) -> Sink:
        """Return the sink."""
        return DeltaSink(**parameters)

    def records(self) -> Records:
        """Read the table's newest version."""
        found: Records = DeltaSink(**self.parameters).table().to_pyarrow_table().to_pylist()
        return found

    def restart(self) -> bool:
        """Kill the S3 server and start it again."""
        self._server.stop(signal.SIGKILL)
        self._server.start()
        return True


SYSTEMS: dict[str, type[System]] = {system.name: system for system in (Sqlite, Kafka, Postgres, Parquet, Delta)}
