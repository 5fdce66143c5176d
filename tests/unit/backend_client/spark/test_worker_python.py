"""The error about workers whose Python cannot run tasks; Spark's part is played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from backend_client.spark.start.worker_python import check_worker_python
from storage.errors import InvalidInputError


def test_daemon_without_its_module_is_explained() -> None:
    """With spark.python.daemon.module, hosts that lack this package are named as such, not by a lost task."""
    said = "EOFException occurred while reading the port number from backend_client.x's stdout"

    def collect() -> None:
        raise RuntimeError(f"Job aborted\n{said}\n\tat org.apache.spark.api.python")

    job = SimpleNamespace(mapPartitions=lambda _: SimpleNamespace(collect=collect))
    context = SimpleNamespace(
        master="spark://h:1",
        pythonExec="python3",
        applicationId="without-module",
        defaultParallelism=2,
        parallelize=lambda *_: job,
    )
    spark: Any = SimpleNamespace(sparkContext=context)
    with pytest.raises(InvalidInputError, match=r"reading the port number.*install them there"):
        check_worker_python(spark)
