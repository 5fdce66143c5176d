"""
Spark's own checkpoint folder, read to see whether it belongs to the state: ``metadata`` and ``offsets/N``.

Read through Hadoop's file system, since the folder may be on any storage that Spark can use.
"""

from __future__ import annotations

import json
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession


class CheckpointLog:
    """The folder given as ``checkpointLocation``."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        self.location = location
        jvm: Any = spark._jvm
        self._jvm = jvm
        self._path = jvm.org.apache.hadoop.fs.Path(location)
        self._files = self._path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())

    def query_id(self) -> str | None:
        """Return the id of the query that the folder belongs to, or None for a new folder."""
        text = self._read("metadata")
        return None if text is None else str(json.loads(text)["id"])

    def offsets(self, batch_id: int) -> str | None:
        """Return Spark's offsets entry of a batch, or None if there is none (any more)."""
        return self._read(f"offsets/{batch_id}")

    def _read(self, name: str) -> str | None:
        path = self._jvm.org.apache.hadoop.fs.Path(self._path, name)
        try:
            stream = self._files.open(path)
        except (PySparkException, Exception) as error:
            if "FileNotFound" in str(error):
                return None
            raise
        try:
            data = bytes(stream.readAllBytes())
        finally:
            stream.close()
        return data.decode()
