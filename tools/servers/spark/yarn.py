"""
A YARN cluster of real processes on loopback: a resource manager, and node managers with an address each.

Every process is stopped by its pid; a node manager's containers are ended with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from xml.sax.saxutils import escape

import psutil
import pyspark

from tools.servers.maven import maven_jars
from tools.servers.programs import free_port, java_program
from tools.servers.spark.processes import ClusterProcesses
from tools.servers.versions import YARN, YARN_LIBRARIES, YARN_VERSION

_HOME = Path(pyspark.__file__).parent
_SERVER = "org.apache.hadoop.yarn.server"
_MANAGER_ADDRESSES = ("address", "scheduler.address", "resource-tracker.address", "admin.address", "webapp.address")
_NODE_ADDRESSES = ("address", "localizer.address", "webapp.address", "collector-service.address", "amrmproxy.address")


def yarn_jars() -> list[Path]:
    """Return the jars of the servers, fetched if missing; the others that they need are PySpark's."""
    own = maven_jars(f"yarn-{YARN_VERSION}", programs=YARN_LIBRARIES, single=[YARN])
    names = ("hadoop-client-", "slf4j-", "log4j-", "jcl-", "commons-logging", "jakarta.")
    return [*own, *(jar for jar in sorted((_HOME / "jars").glob("*.jar")) if jar.name.startswith(names))]


class YarnCluster(ClusterProcesses):
    """
    A resource manager, and one node manager per entry of `hosts`, on 127.0.0.2 and the next addresses.

    Args:
        folder: Folder of configurations, logs and the nodes' own folders.
        hosts: Environment variables of each node's containers.
        memory_mb: Memory of each node.
    """

    def __init__(self, folder: Path, hosts: Sequence[Mapping[str, str]], memory_mb: int = 4096) -> None:
        super().__init__(folder)
        self._hosts = hosts
        self._memory_mb = memory_mb
        self._common = {f"yarn.resourcemanager.{name}": f"127.0.0.1:{free_port()}" for name in _MANAGER_ADDRESSES}

    @property
    def configuration(self) -> Path:
        """The folder for clients' ``HADOOP_CONF_DIR``."""
        return self._folder / "resourcemanager"

    def start(self) -> None:
        """Start all processes, and wait until the nodes are registered."""
        self._start("resourcemanager", "resourcemanager.ResourceManager", {}, {})
        for number, variables in enumerate(self._hosts):
            self._start_node(f"node-{number}", f"127.0.0.{number + 2}", variables)
        for number in range(len(self._hosts)):
            self.wait_for(f"node-{number}", "Registered with ResourceManager")

    def output(self, container: str) -> str:
        """Return the standard output of all containers whose name ends so, such as of an application's driver."""
        files = sorted(self._folder.glob(f"node-*/logs/*/*{container}/stdout"))
        return "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)

    def containers(self, word: str) -> list[psutil.Process]:
        """Return the running Java processes of containers that have a word in their command line."""
        found = []
        for process in self.descendants():
            with suppress(psutil.NoSuchProcess):
                command = process.cmdline()
                if Path(command[0]).name == "java" and word in " ".join(command):
                    found.append(process)
        return found

    def _start_node(self, name: str, address: str, variables: Mapping[str, str]) -> None:
        folder = self._folder / name
        ports = {f"yarn.nodemanager.{part}": f"{address}:{free_port()}" for part in _NODE_ADDRESSES}
        settings = {
            **ports,
            "yarn.nodemanager.hostname": address,
            "yarn.nodemanager.bind-host": address,
            "yarn.nodemanager.local-dirs": str(folder / "local"),
            "yarn.nodemanager.log-dirs": str(folder / "logs"),
            "yarn.nodemanager.resource.memory-mb": str(self._memory_mb),
            "yarn.nodemanager.resource.cpu-vcores": "4",
            # Containers get these of the node manager's own variables.
            "yarn.nodemanager.env-whitelist": ",".join(["JAVA_HOME", "JAVA_TOOL_OPTIONS", *variables]),
            # Memory is that of one machine, on which tests run, and not of a node.
            "yarn.nodemanager.pmem-check-enabled": "false",
            "yarn.nodemanager.vmem-check-enabled": "false",
            "yarn.nodemanager.disk-health-checker.enable": "false",
        }
        self._start(name, "nodemanager.NodeManager", settings, variables)

    def _start(self, name: str, program: str, settings: Mapping[str, str], variables: Mapping[str, str]) -> None:
        folder = self._folder / name
        folder.mkdir()
        common = {
            **self._common,
            "yarn.resourcemanager.hostname": "127.0.0.1",
            "yarn.resourcemanager.bind-host": "127.0.0.1",
            "yarn.resourcemanager.nodemanagers.heartbeat-interval-ms": "100",
            "yarn.scheduler.minimum-allocation-mb": "64",
            "yarn.scheduler.capacity.root.queues": "default",
            "yarn.scheduler.capacity.root.default.capacity": "100",
            "yarn.scheduler.capacity.maximum-am-resource-percent": "1",
            "hadoop.tmp.dir": str(folder / "tmp"),
            **settings,
        }
        for file in ("core-site.xml", "yarn-site.xml", "capacity-scheduler.xml"):
            (folder / file).write_text(_document(common), encoding="utf-8")
        (folder / "log4j2.properties").write_text(_LOGGING, encoding="utf-8")
        classes = ":".join([str(folder), *map(str, yarn_jars())])
        command = [java_program(), "-Xmx256m", "-cp", classes, f"{_SERVER}.{program}"]
        self.launch(name, command, {**os.environ, "HADOOP_CONF_DIR": str(folder), **variables}, folder)


_LOGGING = """rootLogger.level=info
rootLogger.appenderRef.console.ref=console
appender.console.type=Console
appender.console.name=console
appender.console.layout.type=PatternLayout
appender.console.layout.pattern=%d %p %c{1}: %m%n%ex
"""


def _document(settings: Mapping[str, str]) -> str:
    properties = (
        f"<property><name>{escape(name)}</name><value>{escape(value)}</value></property>"
        for name, value in settings.items()
    )
    return f"<configuration>{''.join(properties)}</configuration>\n"
