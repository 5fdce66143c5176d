"""
Things that only root can make: a disk that fills up, and a host that can be cut off silently.

A disk may also be mounted by sudo. Without the right to make a host, a test is skipped and says so; CI refuses that.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tools.servers import network
from tools.servers.s3_server import S3Server

_NUMBERS = itertools.count()


def _run(*command: str) -> None:
    if os.geteuid() != 0:
        pytest.skip(f"only root may run {command[0]!r}")
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Give an empty disk of that size, a tmpfs mounted at `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={size_bytes},mode=0700,uid={os.getuid()}"
    sudo = [] if os.getuid() == 0 else ["sudo", "-n"]
    subprocess.run([*sudo, "mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)
    try:
        yield folder
    finally:  # a process that still has a file open must not keep it mounted
        subprocess.run([*sudo, "umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no room on the disk of a folder."""
    with open(folder / "filler", "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


class Host(network.NetworkedHost):
    """
    A network namespace with one link to this machine: programs in it are on another host, as far as TCP can tell.

    When the link is cut nothing is reset and nothing answers.
    """

    def __init__(self) -> None:
        number = next(_NUMBERS)
        self._link = f"dl{os.getpid() % 1_000_000}n{number}"  # at most 15 characters
        # Networks of four addresses: processes that run at the same time have ids that are not far from each other.
        subnet = os.getpid() % 1024 * 16 + number % 16
        near = ip_address("10.78.0.0") + 4 * subnet + 1
        self._near_address = str(near)
        super().__init__(f"dstl{os.getpid()}-{number}", str(near + 1))

    def __enter__(self) -> Self:
        _run("ip", "netns", "add", self.name)
        try:
            _run("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth", "netns", self.name)
            _run("ip", "address", "add", f"{self._near_address}/30", "dev", self._link)
            _run("ip", "link", "set", self._link, "up")
            _run("ip", "-n", self.name, "address", "add", f"{self.address}/30", "dev", "eth")
            _run("ip", "-n", self.name, "link", "set", "lo", "up")
            self.connect()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _run("ip", "netns", "delete", self.name)  # and the link with it


class Network(network.Network):
    """Hosts that reach each other and nothing else."""

    def __enter__(self) -> Self:
        if reason := network.why_no_network():
            pytest.skip(reason)
        return super().__enter__()


class RemoteS3Server(S3Server):
    """An S3 server on a host of its own."""

    def __init__(self, host: Host) -> None:
        super().__init__(address=host.address)
        self._host = host

    def command(self, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
        """Serve there."""
        command, environment = super().command(port)
        return self._host.command(command), environment
