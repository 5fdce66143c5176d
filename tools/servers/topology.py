"""
The topology of compose/compose.yaml as plain processes on loopback.

An S3 server, the coordinator on TCP with a token, a Spark master, and two workers, each with a sidecar on a Unix
socket. On exit every process is stopped by its pid.
"""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from backend_client.service.client import ServiceClient
from tools.servers.s3_server import S3Server
from tools.servers.service.advertised import AdvertisedService
from tools.servers.service.process import ServiceProcess
from tools.servers.spark.cluster import SparkCluster

WORKERS = 2
_BUCKET = "state"
_READY_PATIENCE_S = 60.0


class Coordinator(AdvertisedService):
    """A service with a token."""

    def __init__(self, folder: Path, storage: str, environment: Mapping[str, str]) -> None:
        self.token = secrets.token_urlsafe(24)
        token_file = folder / "token"
        _write_secret(token_file, self.token)
        super().__init__(folder, storage, "coordinator", environment, ["--token-file", str(token_file)])

    def wait_until_ready(self) -> None:
        """Wait until it can write its storage; `DstlError` if it cannot."""
        client = ServiceClient(self.endpoint_url, self.token, _READY_PATIENCE_S)
        client.get("/ready")
        client.close()


class Topology(ExitStack):
    """
    The whole topology, ready on enter.

    Args:
        folder: Existing folder for data and logs. Sidecars keep their sockets elsewhere, under short paths.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.storage = f"s3://{_BUCKET}/dstl"
        self._store_environment: dict[str, str] = {}

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        (self._folder / "s3").mkdir()
        self.s3 = self.enter_context(S3Server(self._folder / "s3"))
        self.s3.create_bucket(_BUCKET)
        self._store_environment = self.s3.env()
        self.coordinator = self.enter_context(Coordinator(self._folder, self.storage, self._store_environment))
        self.coordinator.wait_until_ready()
        self.sidecars = [
            self.enter_context(ServiceProcess(self.storage, self._store_environment, ["--host-id", f"worker-{number}"]))
            for number in range(1, WORKERS + 1)
        ]
        hosts = [
            {"DSTL_SERVICE": sidecar.address, "DSTL_LOCAL_DIR": str(self._folder / f"local-{number}")}
            for number, sidecar in enumerate(self.sidecars, start=1)
        ]
        self.spark = self.enter_context(SparkCluster(self._folder, hosts))

    def driver_environment(self) -> dict[str, str]:
        """Return the environment variables by which a driver finds storage and coordinator."""
        return {
            **self._store_environment,
            "DSTL_SERVICE": self.coordinator.endpoint_url,
            "DSTL_TOKEN": self.coordinator.token,
            "DSTL_LOCAL_DIR": str(self._folder / "local-driver"),
        }

    def example_command(self) -> list[str]:
        """Return a command that runs the example job here, in `driver_environment`."""
        where = ["--master", self.spark.master_url, "--driver-host", "127.0.0.1", "--storage", self.storage]
        where += ["--checkpoint", f"{self._folder}/checkpoint", "--cores", str(WORKERS)]  # one core per worker
        return [sys.executable, "-m", "examples.cluster_totals", *where]

    def describe(self) -> str:
        """Return the addresses, and the example command for a shell; secrets are in a file that it reads."""
        variables = self._folder / "driver.env"
        _write_secret(
            variables,
            "".join(f"export {name}={shlex.quote(value)}\n" for name, value in self.driver_environment().items()),
        )
        lines = [
            ("S3", f"{self.s3.endpoint_url}  pid {self.s3.pid}"),
            ("coordinator", f"{self.coordinator.endpoint_url}  pid {self.coordinator.pid}"),
            *((f"sidecar {n}", f"{sidecar.address}  pid {sidecar.pid}") for n, sidecar in enumerate(self.sidecars, 1)),
            ("Spark master", f"{self.spark.master_url}  page {self.spark.webui_url}"),
            ("logs", str(self._folder)),
        ]
        table = "\n".join(f"{name:14}{text}" for name, text in lines)
        return f"{table}\n\nA job on it:\n\n(. {variables} && {shlex.join(self.example_command())})\n"


def _write_secret(path: Path, text: str) -> None:
    with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
