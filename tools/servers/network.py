"""
Hosts of their own on one machine: network namespaces at a bridge, which only root can make.

Programs on different hosts reach each other by address and nothing else. A host that is cut off answers nothing and
resets nothing.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tools.servers.programs import ServerError

_NUMBERS = itertools.count()
_PLACES = Path("/run/netns")


def why_no_network() -> str | None:
    """Return why this process cannot make a `Network`; None if it can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    return None if shutil.which("ip") else "the command ip is missing; install iproute2"


class NetworkedHost:
    """A host of a `Network`."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address

    def command(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs there; the process keeps its id."""
        return ["ip", "netns", "exec", self.name, *command]

    def cut_off(self) -> None:
        """Take the link down."""
        _ip("-n", self.name, "link", "set", "eth", "down")

    def connect(self) -> None:
        """Take the link up."""
        _ip("-n", self.name, "link", "set", "eth", "up")

    def enter(self) -> None:
        """Have this thread, and the processes and threads that it starts from now on, run on this host."""
        with (_PLACES / self.name).open() as place:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(place.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"the network namespace {self.name} cannot be entered")


class Network:
    """
    Hosts that reach each other and nothing else; the bridge between them is in a namespace of its own.

    Args:
        hosts: Their number, at most 200.
    """

    def __init__(self, hosts: int) -> None:
        self._switch = f"dstl{os.getpid()}-net{next(_NUMBERS)}"
        self.hosts = [NetworkedHost(f"{self._switch}-{n}", f"10.79.0.{n + 1}") for n in range(hosts)]

    def __enter__(self) -> Self:
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "bridge", "up")
            for number, host in enumerate(self.hosts):
                port = f"port{number}"
                _ip("netns", "add", host.name)
                _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "eth", "netns", host.name)
                _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
                _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth")
                for link in ("eth", "lo"):
                    _ip("-n", host.name, "link", "set", link, "up")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in (*(host.name for host in self.hosts), self._switch):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        raise ServerError(f"ip {' '.join(arguments)} failed: {done.stderr.strip()}")
