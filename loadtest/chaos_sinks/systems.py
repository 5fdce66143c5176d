"""The systems to which the test publishes: how each is started, written to, and read by a reader of committed data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from backend_client.sinks.protocol import Sink
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
        """What `sink` needs, as JSON."""

    @staticmethod
    @abstractmethod
    def sink(parameters: Mapping[str, Any]) -> Sink:
        """Return the sink."""

    @abstractmethod
    def records(self) -> Records:
        """Return what a reader of committed data sees, each key's records in order."""

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


SYSTEMS: dict[str, type[System]] = {system.name: system for system in (Sqlite,)}
