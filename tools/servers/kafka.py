"""A real Kafka: one node that is broker and controller, in a Java process on loopback; or a cluster of three."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from tools.servers.maven import maven_jars
from tools.servers.programs import ServerError, ServerProcess, free_port, java_program
from tools.servers.versions import KAFKA_BROKER, KAFKA_CONNECTORS, KAFKA_VERSION

_CLUSTER_ID = "ZHN0bC10ZXN0LWNsdXN0ZQ"  # 16 bytes in base64
_LOG_TAIL_CHARS = 2_000
_CLUSTER_TIMEOUT_S = 60.0
_POLL_S = 0.1


def connector_jars() -> list[Path]:
    """Return the jars that the installed Spark needs (``spark.jars``) to read from and write to Kafka."""
    artifacts = KAFKA_CONNECTORS[".".join(version("pyspark").split(".")[:2])]
    name, connector = artifacts[0].split(":")[1:]
    return maven_jars(f"{name}-{connector}", single=artifacts)


def broker_jars() -> list[Path]:
    """Return the broker's own jars, fetched if missing."""
    return maven_jars(f"kafka-{KAFKA_VERSION}", programs=KAFKA_BROKER)


class KafkaBroker(ServerProcess):
    """
    A Kafka broker; topics are created on first use. Its data survive a stop.

    Args:
        partitions: Partitions of topics created on first use.
        settings: The broker's settings that differ from those of a test; see `with_users`.
        node: Its number.
        voters: The controllers' ports by number of their node, if it is one of several.
    """

    def __init__(
        self,
        partitions: int = 2,
        settings: Mapping[str, str] | None = None,
        node: int = 1,
        voters: Mapping[int, int] | None = None,
    ) -> None:
        self._own_settings = dict(settings or {})
        self._node = node
        self._voters = voters
        self._folder = tempfile.TemporaryDirectory(prefix="dstl-kafka-", ignore_cleanup_errors=True)
        self._partitions = partitions
        super().__init__("Kafka broker", Path(self._folder.name) / "server.log")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._folder.cleanup()

    @property
    def servers(self) -> str:
        """Address for clients: ``kafka.bootstrap.servers``."""
        return f"{self.address}:{self.port}"

    def command(self, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
        """Format its folder if that is new, and serve it."""
        jars = broker_jars()
        java = [java_program(), "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", f"{jars[0].parent}/*"]
        settings = Path(self._folder.name) / "server.properties"
        settings.write_text(self._settings(port, self._voters or {self._node: free_port()}), encoding="utf-8")
        if not Path(self._folder.name, "data", "meta.properties").exists():
            tool = [*java, "kafka.tools.StorageTool", "format", "--ignore-formatted", "-t", _CLUSTER_ID]
            formatted = subprocess.run([*tool, "-c", str(settings)], capture_output=True, text=True, check=False)
            if formatted.returncode != 0:
                raise ServerError(f"Kafka could not format its folder:\n{formatted.stderr[-_LOG_TAIL_CHARS:]}")
        return [*java, "kafka.Kafka", str(settings)], {}

    def _settings(self, port: int, voters: Mapping[int, int]) -> str:
        broker, controller = f"{self.address}:{port}", f"{self.address}:{voters[self._node]}"
        lines = {
            "process.roles": "broker,controller",
            "node.id": str(self._node),
            "controller.quorum.voters": ",".join(f"{node}@{self.address}:{at}" for node, at in voters.items()),
            "listeners": f"PLAINTEXT://{broker},CONTROLLER://{controller}",
            "advertised.listeners": f"PLAINTEXT://{broker}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": f"{self._folder.name}/data",
            "num.partitions": str(self._partitions),
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "1",
            "group.initial.rebalance.delay.ms": "0",
            "log.cleaner.dedupe.buffer.size": "4194304",
            **self._own_settings,
        }
        return "".join(f"{name}={value}\n" for name, value in lines.items())


class KafkaCluster:
    """
    Three brokers, each also a controller. Everything is stored three times, and two acknowledge each write.

    Args:
        partitions: Partitions of topics created on first use.
        settings: Settings of all brokers.
    """

    def __init__(self, partitions: int = 2, settings: Mapping[str, str] | None = None) -> None:
        voters = {node: free_port() for node in (1, 2, 3)}
        replicated = {
            "default.replication.factor": "3",
            "min.insync.replicas": "2",
            "offsets.topic.replication.factor": "3",
            "transaction.state.log.replication.factor": "3",
            "transaction.state.log.min.isr": "2",
            **(settings or {}),
        }
        self.brokers = {node: KafkaBroker(partitions, replicated, node, voters) for node in voters}

    def __enter__(self) -> Self:
        try:
            with ThreadPoolExecutor(len(self.brokers)) as threads:  # none of them serves before there is a majority
                list(threads.map(KafkaBroker.start, self.brokers.values()))
            self.wait_for(len(self.brokers))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for broker in self.brokers.values():
            broker.stop(signal.SIGKILL)  # asked to stop, the last ones would wait for the others
            broker.__exit__(kind, error, trace)

    @property
    def servers(self) -> str:
        """Addresses for clients: ``kafka.bootstrap.servers``."""
        return ",".join(broker.servers for broker in self.brokers.values())

    def leader(self, topic: str, partition: int = 0) -> int:
        """Return the node that leads a partition; of ``__transaction_state`` it coordinates its transactions."""
        found = self._admin().list_topics(topic, timeout=_CLUSTER_TIMEOUT_S)
        return int(found.topics[topic].partitions[partition].leader)

    def wait_for(self, brokers: int) -> None:
        """Wait until this number of brokers serves; `ServerError` if they do not."""
        deadline = time.monotonic() + _CLUSTER_TIMEOUT_S
        admin = self._admin()
        while time.monotonic() < deadline:
            with suppress(KafkaException):
                if len(admin.list_topics(timeout=_CLUSTER_TIMEOUT_S).brokers) == brokers:
                    return
            time.sleep(_POLL_S)
        raise ServerError(f"the Kafka cluster has not {brokers} brokers after {_CLUSTER_TIMEOUT_S:g} s")

    def _admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.servers, "log_level": 0})


def with_users(**passwords: str) -> dict[str, str]:
    """Return settings of a broker whose users have passwords (SASL/PLAIN) and only the rights that they are given."""
    known = " ".join(f'user_{name}="{password}"' for name, password in {"admin": "admin", **passwords}.items())
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    return {
        "listener.security.protocol.map": "PLAINTEXT:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "listener.name.plaintext.plain.sasl.jaas.config": (
            f'{module} required username="admin" password="admin" {known};'
        ),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:admin;User:ANONYMOUS",  # the controller's own listener has no users
    }
