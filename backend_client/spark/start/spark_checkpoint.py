"""
Spark's own checkpoint folder: read to check that it belongs to the state, and set back together with it.

Spark writes ``offsets/N`` before batch N and ``commits/N`` after it. If the last of both have the same number, Spark
continues with the next batch, from the offsets of that entry and the watermark of that commit. Access goes through
Hadoop's file system, because the folder may be on any storage that Spark can use.
"""

from __future__ import annotations

import json
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from backend_client.batch_time import BatchTime
from backend_client.spark.private.session import hadoop_folder, hadoop_path

_SET_BACK = "dstl-set-back"
"""File with the uid of the checkpoint that the folder was last set back to."""
_GIVEN_UP = "dstl-given-up"
"""Folder with an empty file ``<number>_<batches>_<uid>`` for each time that the folder was set back, from 0 on."""


class CheckpointLog:
    """The folder given as ``checkpointLocation``."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        self.location = location
        self._spark = spark
        self._path, self._files = hadoop_folder(spark, location)
        self._query_id: str | None = None

    def query_id(self) -> str | None:
        """Return the id of the folder's query, which never changes, or None for a new folder."""
        if self._query_id is None and (text := self._read("metadata")) is not None:
            self._query_id = str(json.loads(text)["id"])
        return self._query_id

    def offsets(self, batch_id: int) -> str | None:
        """Return Spark's offsets entry of a batch, or None if it does not exist or was deleted."""
        return self._read(f"offsets/{batch_id}")

    def newest(self) -> int | None:
        """Return the number of the last batch that Spark planned, or None if there is none."""
        return max(self._numbers("offsets"), default=None)

    def remove_unfinished_start(self) -> None:
        """
        Remove what a driver that died in its first write left of it, so that the query can start.

        Spark refuses to begin where ``offsets`` is not empty, and a half-written first entry is there under a hidden
        name. Where any entry is complete, nothing is removed.
        """
        path = self._at("offsets")
        if not self._files.exists(path):
            return
        names = [str(entry.getPath().getName()) for entry in self._files.listStatus(path)]
        if names and all(name.startswith(".") for name in names):
            for name in names:
                self._files.delete(self._at(f"offsets/{name}"), False)

    def given_up(self) -> int:
        """
        Return by how many batches a sink that numbers them is ahead of Spark, which plans their ids again.

        Negative if the query was set forward.
        """
        times = self._times_set_back()
        return times[-1][1] if times else 0

    def rewind(self, batch_id: int, offsets: str, uid: str, closed_ms: int | None = None) -> None:
        """
        Set the query back to the point after a batch: Spark plans the next batch again, with new offsets.

        Runs once per `uid`: a repeated call does nothing, so that a batch planned since then keeps its offsets. An
        interrupted call starts over from its beginning.

        Args:
            batch_id: The batch.
            offsets: Its offsets entry. Spark deletes old entries; those that it needs are written again.
            uid: Identifies this rewind; letters, digits, - and _.
            closed_ms: The watermark in ms at which the batch was closed, None if it was left open. It becomes the next
                batch's watermark if Spark's commit entry is gone.
        """
        if self._read(_SET_BACK) == uid:
            return
        self._note_given_up(batch_id, uid)
        for folder in ("commits", "offsets"):
            later = [number for number in self._numbers(folder) if number > batch_id]
            for number in sorted(later, reverse=True):
                self._files.delete(self._at(f"{folder}/{number}"), False)
        watermark_ms = BatchTime.read(offsets, None).watermark_ms if closed_ms is None else closed_ms
        entries = {"commits": f'v1\n{{"nextBatchWatermarkMs":{watermark_ms}}}', "offsets": offsets}
        is_other = self._read(f"offsets/{batch_id}") != offsets  # deleted, or from a branch that was itself given up
        # Spark also needs the entries before the last; they must not be ahead of it. The batch's offsets are written
        # last: while they differ, no other entry is trusted.
        for number in range(max(0, batch_id - 1), batch_id + 1):
            for folder, text in entries.items():
                if is_other or self._read(f"{folder}/{number}") is None:
                    self._write(f"{folder}/{number}", text)
        self._write(_SET_BACK, uid)

    def _note_given_up(self, batch_id: int, uid: str) -> None:
        times = self._times_set_back()
        if any(noted == uid for _, _, noted in times):
            return  # an earlier call was interrupted, maybe after it deleted entries
        newest = max([*self._numbers("offsets"), *self._numbers("commits")], default=batch_id)
        self._write(f"{_GIVEN_UP}/{len(times)}_{self.given_up() + newest - batch_id}_{uid}", "")

    def _times_set_back(self) -> list[tuple[int, int, str]]:
        """Return number, batches given up until then, and uid of each time."""
        names = [name.split("_", 2) for name in self._names(_GIVEN_UP) if name[0].isdigit()]
        return sorted((int(number), int(batches), uid) for number, batches, uid in names)

    def _numbers(self, folder: str) -> list[int]:
        return [int(name) for name in self._names(folder) if name.isdigit()]

    def _names(self, folder: str) -> list[str]:
        path = self._at(folder)
        if not self._files.exists(path):
            return []
        return [str(entry.getPath().getName()) for entry in self._files.listStatus(path)]

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
