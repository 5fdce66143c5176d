"""
Spark's own checkpoint folder: read to see whether it belongs to the state, and set back with it.

``offsets/N`` is written before batch N, ``commits/N`` behind it; where the last of both have one number, Spark goes on
with the next batch, from the offsets of that entry and the watermark of that commit. Through Hadoop's file system,
since the folder may be on any storage that Spark can use.
"""

from __future__ import annotations

import json
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from backend_client.batch_time import BatchTime
from backend_client.spark.private.session import hadoop_folder, hadoop_path

_SET_BACK = "dstl-set-back"
"""File with the uid of the checkpoint that the folder was set back to last."""


class CheckpointLog:
    """The folder given as ``checkpointLocation``."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        self.location = location
        self._spark = spark
        self._path, self._files = hadoop_folder(spark, location)
        self._query_id: str | None = None

    def query_id(self) -> str | None:
        """Return the id of the query that the folder belongs to, or None for a new folder; it never changes."""
        if self._query_id is None and (text := self._read("metadata")) is not None:
            self._query_id = str(json.loads(text)["id"])
        return self._query_id

    def offsets(self, batch_id: int) -> str | None:
        """Return Spark's offsets entry of a batch, or None if there is none (any more)."""
        return self._read(f"offsets/{batch_id}")

    def newest(self) -> int | None:
        """Return the number of the last batch that Spark has planned, or None if there is none."""
        return max(self._numbers("offsets"), default=None)

    def rewind(self, batch_id: int, offsets: str, uid: str, closed_ms: int | None = None) -> None:
        """
        Set the query back to where it stood behind a batch: the next one is the one behind it, with offsets of its own.

        Once it is done nothing is done again, so that a batch which began since then keeps its offsets. If it is
        interrupted, it is done again from its beginning.

        Args:
            batch_id: The batch.
            offsets: Its offsets entry. Spark deletes entries after a while; those that it needs are written again.
            uid: Names this setting back.
            closed_ms: The watermark at which the batch was closed, if it was: the next one's, where Spark's is gone.
        """
        if self._read(_SET_BACK) == uid:
            return
        for folder in ("commits", "offsets"):
            later = [number for number in self._numbers(folder) if number > batch_id]
            for number in sorted(later, reverse=True):
                self._files.delete(self._at(f"{folder}/{number}"), False)
        watermark_ms = BatchTime.read(offsets, None).watermark_ms if closed_ms is None else closed_ms
        entries = {"commits": f'v1\n{{"nextBatchWatermarkMs":{watermark_ms}}}', "offsets": offsets}
        is_other = self._read(f"offsets/{batch_id}") != offsets  # gone, or of a past that was itself given up
        # Spark wants the entries before the last as well; they must not be ahead of it. The batch's offsets come last:
        # as long as they are others, nothing of the rest is trusted.
        for number in range(max(0, batch_id - 1), batch_id + 1):
            for folder, text in entries.items():
                if is_other or self._read(f"{folder}/{number}") is None:
                    self._write(f"{folder}/{number}", text)
        self._write(_SET_BACK, uid)

    def _numbers(self, folder: str) -> list[int]:
        path = self._at(folder)
        if not self._files.exists(path):
            return []
        names = [str(entry.getPath().getName()) for entry in self._files.listStatus(path)]
        return [int(name) for name in names if name.isdigit()]

    def _at(self, name: str) -> Any:
        return hadoop_path(self._spark, self._path, name)

    def _write(self, name: str, text: str) -> None:
        stream = self._files.create(self._at(name), True)
        try:
            stream.write(text.encode())
        finally:
            stream.close()

    def _read(self, name: str) -> str | None:
        try:
            stream = self._files.open(self._at(name))
        except (PySparkException, Exception) as error:
            if "FileNotFound" in str(error):
                return None
            raise
        try:
            data = bytes(stream.readAllBytes())
        finally:
            stream.close()
        return data.decode()
