"""
A YARN cluster of two nodes: the driver runs in a container, and the packages come with the job.

A failure means that a cluster where nothing is installed but Java and Python cannot run a job, or that a driver whose
container dies is not replaced by YARN without loss.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pyspark
import pytest

import backend_client
import dstl_service
import storage
from backend_client.spark.api.recommended_settings import recommended_settings
from storage.open import open_store
from tests.sidecars import sidecars_of
from tests.waiting import wait_until
from tools.servers.programs import PROJECT_ROOT
from tools.servers.spark.yarn import YarnCluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(480)]

NODES = 2
BATCHES = 4
MODULES = (backend_client, dstl_service, storage)
SPARK = Path(pyspark.__file__).parent


@pytest.fixture
def folders(make_local_dir: Callable[[], Path]) -> list[Path]:
    """One local folder per node, short enough for sockets; sidecars started there are stopped by their pid."""
    return [make_local_dir() for _ in range(NODES)]


def environment_archive(folder: Path) -> Path:
    """Pack an environment as users do for ``--archives``: an interpreter, and packages that no host has installed."""
    environment = folder / "environment"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    (environment / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    packages = environment / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    packages.mkdir(parents=True)
    others = next(path for path in sys.path if path.endswith("site-packages"))
    (packages / "others.pth").write_text(f"{others}\n")  # would take minutes to pack
    archive = folder / "environment.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as file:
        for path in sorted(environment.rglob("*")):
            file.add(path, path.relative_to(environment), recursive=False)
        for module in MODULES:
            assert module.__file__ is not None
            source = Path(module.__file__).parent
            file.add(source, (packages / source.name).relative_to(environment), filter=without_byte_code)
    return archive


def without_byte_code(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in info.name else info


def submitted(cluster: YarnCluster, folder: Path, archive: Path) -> subprocess.Popen[bytes]:
    """Submit the job in cluster mode; return the process that waits for its end."""
    settings: Mapping[str, object] = {
        "spark.driver.memory": "700m",
        "spark.executor.instances": NODES,
        "spark.executor.cores": 1,
        "spark.executor.memoryOverhead": "300m",
        "spark.yarn.jars": f"local:{SPARK}/jars/*",
        "spark.yarn.appMasterEnv.PYSPARK_PYTHON": "./environment/bin/python",
        "spark.yarn.appMasterEnv.SPARK_LOCAL_IP": "127.0.0.1",
        "spark.yarn.maxAppAttempts": 2,
        "spark.yarn.report.interval": "200ms",
        "spark.scheduler.minRegisteredResourcesRatio": 1.0,
        **{setting.name: setting.value for setting in recommended_settings()},
        "spark.locality.wait": "60s",  # however slow the machine is
    }
    command = [str(SPARK / "bin" / "spark-submit"), "--master", "yarn", "--deploy-mode", "cluster"]
    command += ["--archives", f"{archive.as_uri()}#environment"]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    command += [str(PROJECT_ROOT / "examples" / "cluster_totals.py"), "--master", "yarn", "--batches", str(BATCHES)]
    command += ["--storage", f"file://{folder}/store", "--checkpoint", f"{folder}/checkpoint"]
    unset = ("PYTHONPATH", "PYSPARK_DRIVER_PYTHON", "PYSPARK_PYTHON")
    variables = {name: value for name, value in os.environ.items() if name not in unset}
    variables |= {"SPARK_HOME": str(SPARK), "HADOOP_CONF_DIR": str(cluster.configuration)}
    with open(folder / "submit.log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=variables, cwd=folder)


def batches_of(output: str) -> list[int]:
    return [int(number) for number in re.findall(r"^batch (\d+): ", output, re.MULTILINE)]


def test_driver_is_started_again_where_nothing_is_installed(tmp_path: Path, folders: list[Path]) -> None:
    """
    YARN starts a killed driver once more; it goes on with the next batch, and all totals are right.

    Each node writes one object per checkpoint. The sidecars run from the application's files, not from the container's
    own folder, which is deleted before them.
    """
    hosts = [{"DSTL_LOCAL_DIR": str(folder)} for folder in folders]
    with YarnCluster(tmp_path, hosts) as cluster, submitted(cluster, tmp_path, environment_archive(tmp_path)) as submit:
        try:
            wait_until(
                lambda: len(batches_of(cluster.output("_01_000001"))) >= 2 or submit.poll() is not None,
                240,
                what="two batches",
            )
            (driver,) = cluster.containers("ApplicationMaster")
            started = [psutil.Process(pid).cmdline()[0] for folder in folders for pid in sidecars_of(folder)]
            driver.kill()
            exit_code = submit.wait(240)
        finally:
            submit.kill()
        outputs = [batches_of(cluster.output(f"_0{attempt}_000001")) for attempt in (1, 2)]

    assert exit_code == 0, (tmp_path / "submit.log").read_text()[-3000:]
    assert outputs[0] == list(range(len(outputs[0])))
    # The batch whose output was printed last may have no checkpoint yet.
    assert outputs[1][0] in (len(outputs[0]), len(outputs[0]) - 1)
    assert outputs[1] == list(range(outputs[1][0], outputs[1][0] + BATCHES))
    assert len(started) == NODES
    assert not [path for path in started if "/container_" in path or not path.endswith("/bin/python")]
    checkpoints = outputs[1][-1] + 1
    segments = [info.key for info in open_store(f"file://{tmp_path}/store").list("cluster-totals/segments/")]
    assert len(segments) <= NODES * (checkpoints + 2)
