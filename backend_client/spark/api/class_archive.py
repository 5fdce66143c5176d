"""
``python -m backend_client class-archive FILE``: an archive with which Spark's drivers and executors start faster.

About half of the time to a driver's first batch is spent by its JVM on reading and verifying the classes of Spark. Java
can keep them in a form that is mapped into memory (class data sharing). The archive is written at the end of a small
job with this backend, which loads the classes that a streaming job needs. It fits the Java and the jars it was made
with; with others, Java ignores it and starts as without it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from backend_client.columnar import Aggregate, Count
from backend_client.columnar.windows import tumbling
from backend_client.spark.api.backend import ChangelogStateBackend
from storage.errors import InternalError, InvalidInputError

_ROWS = 1000
_ERROR_CHARACTERS = 2000
_WINDOW = timedelta(minutes=1)


def write_class_archive(path: Path, options: Sequence[str] = ()) -> None:
    """
    Run a small local job in a process of its own, and write the archive of its classes; takes about a minute.

    Args:
        path: The archive, about 170 MB. It appears when it is complete, and replaces an older one.
        options: Options for ``spark-submit`` with which the archive's users start, such as ``--packages``.

    Raises:
        InvalidInputError: The folder cannot be written, or the path has a space, at which Spark would split it.
        InternalError: The job failed, or Java wrote no archive; the message has the end of its output.
    """
    path = path.absolute()
    if " " in str(path):
        raise InvalidInputError(f"{str(path)!r} has a space, at which Spark splits Java's options: choose another path")
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise InvalidInputError(f"{path.parent} cannot be written: {error.strerror}; choose another folder") from error
    try:
        made = folder / "archive"
        java = f"-XX:ArchiveClassesAtExit={made} -Xlog:cds=off -Xlog:cds+dynamic=off"
        done = subprocess.run(
            [sys.executable, "-m", "backend_client.spark.api.class_archive"],
            env={
                **_environment(),
                "PYSPARK_PYTHON": sys.executable,
                "PYSPARK_DRIVER_PYTHON": sys.executable,
                "PYSPARK_SUBMIT_ARGS": shlex.join(["--driver-java-options", java, *options, "pyspark-shell"]),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != 0 or not made.exists():
            raise InternalError(f"no archive was written: {done.stdout[-_ERROR_CHARACTERS:]}")
        try:
            made.replace(path)
        except OSError as error:
            raise InvalidInputError(f"{path} cannot be replaced: {error.strerror}; choose another path") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _environment() -> dict[str, str]:
    """Return this process's environment without the host's service and its settings: the job has its own."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("DSTL_") or name.startswith("DSTL_TRUSTED_")
    }


class _Numbers(StatefulProcessor):
    """Numbers a key's rows."""

    def init(self, handle: Any) -> None:
        """Declare the state."""
        self._count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        """Yield the rows with their numbers."""
        n = (self._count.get() or (0,))[0]
        for row in rows:
            n += 1
            yield Row(k=key[0], at=row.at, n=n)
        self._count.update((n,))

    def close(self) -> None:
        """Do nothing: there are no resources."""


def _run_job(folder: Path) -> None:
    """Run a query of both kinds of operator over files, into files."""
    spark = (
        SparkSession.builder.master("local[2]")
        .appName("dstl-class-archive")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    rows = spark.range(_ROWS).select((F.col("id") % 10).alias("k"), F.timestamp_seconds("id").alias("at"))
    rows.write.json(str(folder / "in"))
    stream = spark.readStream.schema(rows.schema).json(str(folder / "in")).withWatermark("at", "1 second")
    backend = ChangelogStateBackend(
        f"file://{folder}/store", job="archive", local_dir=str(folder / "local"), parallelism=2
    )
    try:
        numbered = backend.transform_with_state(
            stream.groupBy("k"),
            _Numbers(),
            "k long, at timestamp, n long",
            "Append",
            "EventTime",
            eventTimeColumnName="at",
        )
        windows = Aggregate(Count(name="n"), windows=tumbling("at", _WINDOW))
        result = backend.transform_columns(numbered.groupBy("k"), windows, outputMode="Append")
        writer = result.writeStream.format("parquet").trigger(availableNow=True)
        writer.option("checkpointLocation", str(folder / "checkpoint")).start(str(folder / "out")).awaitTermination()
        spark.read.parquet(str(folder / "out")).collect()
    finally:
        with suppress(OSError, ValueError):  # if none was started
            os.kill(int(Path(backend.auto_started_sidecar.pid_path).read_text(encoding="utf-8")), signal.SIGTERM)
    spark.stop()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="dstl-", ignore_cleanup_errors=True) as place:
        _run_job(Path(place))
