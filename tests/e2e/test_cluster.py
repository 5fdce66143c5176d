"""
Several hosts: a standalone Spark cluster whose workers have, each for itself, a local folder and a sidecar.

A failure means that sets of another host's sidecar were lost, or that hosts did not share objects as promised.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from backend_client.service.client import ServiceClient
from storage.open import open_store
from tests.announced import wait_until_announced
from tests.e2e.support import expected_output, expected_state, random_input, stored_totals, write_input
from tests.sidecars import sidecars_of
from tests.support.machine import Network
from tests.waiting import wait_until
from tools.servers.network import NetworkedHost
from tools.servers.programs import free_port
from tools.servers.spark.cluster import SparkCluster

pytestmark = pytest.mark.e2e

HOSTS = 3  # of the driver and of two workers
FILES = random_input(seed=60, batches=3, rows=120, keys=40)


@pytest.fixture
def folders(make_local_dir: Callable[[], Path]) -> list[Path]:
    """One local folder per host, short enough for sockets; sidecars started there are stopped by their pid."""
    return [make_local_dir() for _ in range(HOSTS)]


@contextmanager
def tcp_service(storage: str, folder: Path, host_id: str) -> Iterator[str]:
    """Run a host's service on TCP, with a token and an address for other hosts; yield the address."""
    address = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "dstl_service", "serve", "--storage", storage, "--host-id", host_id]
    command += ["--port", address.rsplit(":", 1)[1], "--advertise", address, "--token-file", str(folder / "token")]
    (folder / "token").write_text("secret")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        client = ServiceClient(address, "secret", patience_s=60)
        wait_until_announced(client, host_id)
        client.close()
        yield address
    finally:
        process.kill()
        process.wait()


def run_driver(cluster: SparkCluster, folder: Path, storage: str, environment: dict[str, str]) -> dict[str, Any]:
    """Run the job to its end on the cluster; return its output and figures."""
    write_input(folder / "in", FILES)
    command = [sys.executable, "-m", "tests.e2e.cluster_program", "--master", cluster.master_url]
    command += ["--folder", str(folder), "--storage", storage]
    root = str(Path(__file__).parents[2])
    subprocess.run(
        command,
        check=True,
        cwd=folder,
        timeout=480,
        env={**os.environ, "PYTHONPATH": root, "PYSPARK_PYTHON": sys.executable, **environment},
    )
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def check(result: dict[str, Any], storage: str) -> None:
    """Compare output and state with a plain computation."""
    output = {int(batch): [tuple(row) for row in rows] for batch, rows in result["batches"].items()}
    assert output == expected_output(FILES)
    assert stored_totals(storage, "job") == expected_state(FILES)


STRANGER = """
import socket, ssl, sys
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
for sent in (b"GET /v1/info HTTP/1.1\\r\\nhost: x\\r\\n\\r\\n", b"\\0\\0\\0\\x12" + b'{"job":"job","x":1}'):
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), 20) as plain:
        with context.wrap_socket(plain) as connection:
            connection.sendall(sent)
            assert connection.recv(100) == b"", "a stranger gets an answer"
"""


def listeners(machine: NetworkedHost, pids: Collection[int]) -> list[tuple[str, int]]:
    """Return address and port of each TCP socket on a machine on which one of the processes listens."""
    lines = subprocess.run(machine.command(["ss", "-ltnpH"]), check=True, capture_output=True, text=True).stdout
    found = []
    for line in lines.splitlines():
        if {int(pid) for pid in re.findall(r"pid=(\d+)", line)} & set(pids):
            address, _, port = line.split()[3].rpartition(":")
            found.append((address, int(port)))
    return found


def test_machines_need_nothing_but_the_package(tmp_path: Path, folders: list[Path]) -> None:
    """
    Machines of their own share objects without any set-up, and only the driver's listens, to hosts with the token.

    Embedded sidecars connect to the coordinator: each host writes one object per checkpoint, from the first one on. A
    scan from a further machine finds nothing else of ours.

    I5: in another storage, where the coordinator cannot reach a host's sidecar, the host's tasks persist their sets
    alone. Partitions stay with their executors: over all batches, each table is made on only one host.
    """
    linked, apart = f"file://{tmp_path / 'store'}", f"file://{tmp_path / 'apart'}"
    done = tmp_path / "done"
    hosts = [{"DSTL_LOCAL_DIR": str(folder), "PYTHONPATH": str(Path(__file__).parents[2])} for folder in folders]
    write_input(tmp_path / "in", FILES)
    with Network(HOSTS + 1) as network:
        driver, *workers, stranger = network.hosts
        with SparkCluster(tmp_path, hosts[1:], machines=[driver, *workers]) as cluster:
            command = [sys.executable, "-m", "tests.e2e.cluster_program", "--master", cluster.master_url]
            command += ["--folder", str(tmp_path), "--storage", linked, "--apart", apart]
            command += ["--host", driver.address, "--wait-for", str(done)]
            environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": driver.address, **hosts[0]}
            with subprocess.Popen(driver.command(command), cwd=tmp_path, env=environment) as program:
                try:
                    wait_until(lambda: (tmp_path / "apart.json").exists() or program.poll() is not None, 300)
                    assert program.poll() is None
                    found = [listeners(*pair) for pair in zip(network.hosts, map(sidecars_of, folders), strict=False)]
                    ((address, port),) = found[0]
                    ask = [sys.executable, "-c", STRANGER, driver.address, str(port)]
                    subprocess.run(stranger.command(ask), check=True)
                finally:
                    done.touch()
                    program.wait(60)

    assert address == driver.address
    assert found[1:] == [[], []]
    for name, storage in (("result", linked), ("apart", apart)):
        result = json.loads((tmp_path / f"{name}.json").read_text())
        check(result, storage)
        objects = list(open_store(storage).list("job/segments/"))
        shared = len(workers) * len(result["batches"])  # each worker has two tasks
        assert (len(objects) == shared) if storage == linked else len(objects) >= 2 * shared
    assert [len(list(folder.glob("service-*.pid"))) for folder in folders] == [2] * HOSTS
    tables = Counter(table.relative_to(folder) for folder in folders for table in folder.glob("tables/*/Totals/*"))
    assert len(tables) == 2 * 4
    assert set(tables.values()) == {1}


def test_hosts_share_objects_over_tcp(tmp_path: Path, folders: list[Path]) -> None:
    """With addresses for each other, each host writes one object per checkpoint, however many tasks it runs."""
    storage = f"file://{tmp_path / 'store'}"
    with ExitStack() as stack:
        hosts = []
        for number, folder in enumerate(folders):
            address = stack.enter_context(tcp_service(storage, folder, f"host-{number}"))
            hosts.append(
                {
                    "DSTL_LOCAL_DIR": str(folder),
                    "DSTL_SERVICE": address,
                    "DSTL_TOKEN": "secret",
                    "PYTHONPATH": str(Path(__file__).parents[2]),
                }
            )
        cluster = stack.enter_context(SparkCluster(tmp_path, hosts[1:]))
        result = run_driver(cluster, tmp_path, storage, hosts[0])

    check(result, storage)
    # Two workers with two tasks each: one object per worker, and the manifest.
    assert max(progress["objects_written"] for progress in result["progress"]) <= 3
    hosts_seen = Counter(info.key.split("/")[2] for info in open_store(storage).list("job/segments/"))
    assert set(hosts_seen) == {"host-1", "host-2"}
