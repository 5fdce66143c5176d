"""
Spark's own checkpoint folder: read to check that it belongs to the state, and set back together with it.

Spark writes ``offsets/N`` before batch N and ``commits/N`` after it. If the last of both have the same number, Spark
continues with the next batch, from the offsets of that entry and the watermark of that commit. Access goes through
Hadoop's file system, because the folder may be on any storage that Spark can use.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from backend_client.batch_time import BatchTime
from backend_client.spark.private.session import hadoop_folder, hadoop_path
from storage.errors import ConflictError

_SET_BACK = "dstl-set-back"
"""File with the uid of the checkpoint that the folder was last set back to."""
_GIVEN_UP = "dstl-given-up"
"""Folder with an empty file ``<number>_<batches>_<uid>`` for each time that the folder was set back or made for a fork,
from 0 on."""
_CLOSED = "dstl-closings"
"""Folder with a file ``<batch>_<driver's epoch>_<uid of its base>`` of a batch whose output may be seen without its
checkpoint: the watermark at which it was closed, and, where the query has one, the delay of later batches. (A file
``dstl-closed`` was its precursor.)"""
_CLOSED_BY = "dstl-closed-by"
"""File of former versions, with the delay of the only watermark."""
_NOTE = re.compile(r"[0-9]+_[0-9]+_.*")
_FORK = "dstl-fork"
"""File with the origin of the fork for which the folder was made."""
_ENTRY = re.compile(r"([0-9]+)(\.compact)?")
"""Name of an entry in a source's log; a compacted one also has all entries before it."""


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

    def planned(self, batch_id: int) -> str:
        """
        Return Spark's offsets entry of a batch that it executes.

        Raises:
            ConflictError: Another driver has deleted it.
        """
        if (offsets := self.offsets(batch_id)) is None:
            raise ConflictError(
                f"the Spark checkpoint {self.location} has no entry of batch {batch_id} any more: another driver has "
                "set it back; start the query again if no other one runs"
            )
        return offsets

    def newest(self) -> int | None:
        """Return the number of the last batch that Spark planned, or None if there is none."""
        return max(self._numbers("offsets"), default=None)

    def committed(self) -> int | None:
        """Return the number of the last batch that Spark has committed, or None if there is none."""
        return max(self._numbers("commits"), default=None)

    def next_id(self) -> int:
        """Return the number of the first batch that Spark has not planned."""
        return max([*self._numbers("offsets"), *self._numbers("commits")], default=-1) + 1

    def remove_unfinished_start(self) -> None:
        """
        Remove what a driver that died in its first write left of it, so that the query can start.

        Spark refuses to begin where ``offsets`` is not empty, and a half-written first entry is there under a hidden
        name. Where any entry is complete, nothing is removed.
        """
        names = self._names("offsets")
        if all(name.startswith(".") for name in names):
            for name in names:
                self._files.delete(self._at(f"offsets/{name}"), False)

    def given_up(self) -> int:
        """
        Return by how many batches a sink that numbers them is ahead of Spark, which plans their ids again.

        Negative if the query was set forward, or is a fork, whose sinks begin with 0.
        """
        times = self._times_set_back()
        return times[-1][1] if times else 0

    def rewind(
        self, batch_id: int, offsets: str, uid: str, closed_ms: int | None = None, newest: int | None = None
    ) -> None:
        """
        Set the query back to the point after a batch: Spark plans the next batch again, with new offsets.

        Runs once per `uid`: a repeated call does nothing, so that a batch planned since then keeps its offsets. An
        interrupted call starts over from its beginning. One that was suspended ends when another has completed.

        Args:
            batch_id: The batch.
            offsets: Its offsets entry. Spark deletes old entries; those that it needs are written again.
            uid: Identifies this rewind; letters, digits, - and _.
            closed_ms: The watermark in ms at which the batch was closed, None if it was left open. It becomes the next
                batch's watermark if Spark's commit entry is gone.
            newest: The last batch that the state had before. A folder that is an older copy, or lost its last entries,
                knows less, but sinks have that batch's output.

        Raises:
            ConflictError: Another driver has set the query back meanwhile, and plans batches with the same numbers.
        """
        before = self._read(_SET_BACK)
        if before == uid:
            return
        self._note_given_up(batch_id, uid, newest)
        for folder in ("commits", "offsets"):
            later = [number for number in self._numbers(folder) if number > batch_id]
            for number in sorted(later, reverse=True):
                self._check_set_back(before)
                self._files.delete(self._at(f"{folder}/{number}"), False)
        watermark_ms = BatchTime.read(offsets, None).watermark_ms if closed_ms is None else closed_ms
        entries = {"commits": f'v1\n{{"nextBatchWatermarkMs":{watermark_ms}}}', "offsets": offsets}
        is_other = self._read(f"offsets/{batch_id}") != offsets  # deleted, or from a branch that was itself given up
        # Spark also needs the entries before the last; they must not be ahead of it. The batch's offsets are written
        # last: while they differ, no other entry is trusted.
        for number in range(max(0, batch_id - 1), batch_id + 1):
            for folder, text in entries.items():
                if is_other or not self._read(f"{folder}/{number}"):  # an earlier call may have died after creating it
                    self._check_set_back(before)
                    self._write(f"{folder}/{number}", text)
        self._check_set_back(before)
        self._write(_SET_BACK, uid)

    def _check_set_back(self, before: str | None) -> None:
        if self._read(_SET_BACK) != before:
            raise ConflictError(
                f"another driver has set the Spark checkpoint {self.location} back while this one did: start the query "
                "again if no other one runs"
            )

    def note_closed(
        self, batch_id: int, base: str, closed_ms: int | None, delay_ms: int | None = None, epoch: int = 0
    ) -> int | None:
        """
        Note the watermark at which a batch is closed, None if it is left open, before its output is seen.

        Returns what is noted: the newest driver that has noted the batch is followed. The delay is that of later
        batches, for `closing_delay`.

        Each driver writes a file of its own, since one that is suspended while it writes may replace a later file of
        the same name. Before output is seen, the caller must ask whether the job is still its own: if not, a newer
        driver may have looked before this note was there.
        """
        names, own, is_noted = self._note_names(), f"{batch_id}_{epoch}_{base}", False
        for name in sorted(names, key=_epoch_of):
            if _batch_of(name) == batch_id and _base_of(name) == base and "closed_ms" in (noted := self._note(name)):
                closed_ms, is_noted = noted["closed_ms"], is_noted or name == own
        if not is_noted:  # once: a crash could cut it off
            self._write(f"{_CLOSED}/{own}", json.dumps({"closed_ms": closed_ms, "delay_ms": delay_ms}))
        for name in names:  # a newer driver's are left alone: after a rewind they may be of earlier batches
            if _batch_of(name) < batch_id and _epoch_of(name) <= epoch:
                self._files.delete(self._at(f"{_CLOSED}/{name}"), False)
        return closed_ms

    def closing_delay(self, batch_id: int) -> int | None:
        """Return the delay in ms that the newest driver noted before a batch; None if there is no such note."""
        names = [name for name in self._note_names() if _batch_of(name) < batch_id]
        for name in sorted(names, key=lambda name: (_epoch_of(name), _batch_of(name)), reverse=True):
            if (delay_ms := self._note(name).get("delay_ms")) is not None:
                return int(delay_ms)
        return self._noted(_CLOSED_BY).get("delay_ms")

    def _note_names(self) -> list[str]:
        return [name for name in self._names(_CLOSED) if _NOTE.fullmatch(name)]

    def _note(self, name: str) -> dict[str, Any]:
        return self._noted(f"{_CLOSED}/{name}")

    def _noted(self, name: str) -> dict[str, Any]:
        """Return a note; an empty one if there is none, or its writer was killed: nobody has seen output then."""
        try:
            noted = json.loads(self._read(name) or "{}")
        except Exception as error:
            if isinstance(error, ValueError) or "ChecksumException" in str(error):
                return {}
            raise
        return noted if isinstance(noted, dict) else {}

    def begins_at(self, uid: str) -> bool:
        """Return whether the folder was last set back to the checkpoint of this uid, or made for it by `fork`."""
        return self._read(_SET_BACK) == uid

    def is_of_fork(self, origin: str) -> bool:
        """Return whether the folder was made for the fork of this origin by `fork`."""
        return self._read(_FORK) == origin

    def fork(
        self,
        batch_id: int,
        offsets: str,
        uid: str,
        closed_ms: int | None,
        origin: str,
        parent: CheckpointLog | None,
        logged: Mapping[int, int | None],
    ) -> None:
        """
        Make a new folder that stands at the point after a batch of another query. An interrupted call is repeated.

        Args:
            batch_id: The batch; as the next three in `rewind`.
            offsets: Its offsets entry.
            uid: Identifies the fork.
            closed_ms: The watermark in ms at which the batch was closed, or None.
            origin: Identifies the fork, also after it was rewound.
            parent: The other query's folder, from which the logs of `logged` are copied.
            logged: Sources by number that keep a log of their own, up to which entry; None: the whole log.

        Raises:
            ConflictError: An entry that is needed is not in the other folder any more.
        """
        for source, until in logged.items():
            assert parent is not None
            self._copy_log(parent, f"sources/{source}", until)
        if not self._times_set_back():
            # A sink that numbers batches begins with 0: its log, which begins later, could be neither read nor merged.
            self._write(f"{_GIVEN_UP}/0_{-1 - batch_id}_{uid}", "")
        self.rewind(batch_id, offsets, uid, closed_ms)
        self._write(_FORK, origin)
        self._write("metadata.new", json.dumps({"id": str(uuid.uuid4())}))
        self._files.rename(self._at("metadata.new"), self._at("metadata"))

    def _copy_log(self, parent: CheckpointLog, folder: str, until: int | None) -> None:
        found = {name: match for name in parent._names(folder) if (match := _ENTRY.fullmatch(name))}
        wanted = {name: match for name, match in found.items() if until is None or int(match[1]) <= until}
        first = max((int(match[1]) for match in wanted.values() if match[2]), default=0)
        texts = {name: text for name in wanted if (text := parent._read(f"{folder}/{name}")) is not None}
        there = {int(wanted[name][1]) for name in texts}  # Spark may have deleted some since they were listed
        if missing := [number for number in range(first, (until or 0) + 1) if number not in there]:
            raise ConflictError(
                f"the Spark checkpoint {parent.location} has no entry {missing[0]} in {folder} any more, which a fork "
                "at this checkpoint needs: fork a newer one"
            )
        for name, text in texts.items():
            self._write(f"{folder}/{name}", text)

    def _note_given_up(self, batch_id: int, uid: str, state_newest: int | None) -> None:
        times = self._times_set_back()
        if any(noted == uid for _, _, noted in times):
            return  # an earlier call was interrupted, maybe after it deleted entries
        newest = max((self.next_id() or batch_id + 1) - 1, -1 if state_newest is None else state_newest)
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
        with closing(self._files.create(self._at(name), True)) as stream:
            stream.write(text.encode())

    def _read(self, name: str) -> str | None:
        try:
            stream = self._files.open(self._at(name))
        except (PySparkException, Exception) as error:
            if "FileNotFound" in str(error):
                return None
            raise
        with closing(stream):
            return bytes(stream.readAllBytes()).decode()


def _batch_of(note: str) -> int:
    return int(note.split("_", 1)[0])


def _epoch_of(note: str) -> int:
    return int(note.split("_", 2)[1])


def _base_of(note: str) -> str:
    return note.split("_", 2)[2]
