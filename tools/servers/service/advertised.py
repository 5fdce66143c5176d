"""A service on TCP that other hosts can call, as a coordinator or a host of tasks is one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.servers.programs import ServerProcess


class AdvertisedService(ServerProcess):
    """
    ``dstl serve`` on TCP, with an advertised address.

    Args:
        folder: Existing folder of its log.
        storage: URL of its storage.
        host_id: Name of its host.
        environment: Additional environment variables, such as settings and credentials.
        arguments: Additional arguments, such as the file of a token.
    """

    def __init__(
        self,
        folder: Path,
        storage: str,
        host_id: str,
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        super().__init__(host_id, folder / f"{host_id}.log")
        self._command = [sys.executable, "-m", "dstl_service", "serve", "--storage", storage, "--host-id", host_id]
        self._command += arguments
        self._environment = environment or {}

    def command(self, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
        """Serve the storage."""
        return [*self._command, "--port", str(port), "--advertise", f"http://{self.address}:{port}"], self._environment
