"""
A Spark task that rewrites tables to another number of key groups.

It reads a table entry by entry, and logs each one under the key group that its key has now.

The key group of an entry is computed from the key's stored bytes; the old one is computed, too, and compared with
the one that Spark has computed when the entry was written. So a hash that differed from Spark's would be an error, and
no entry would be lost under a key group where Spark does not look.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

import pyarrow as pa
from pyspark import TaskContext

from backend_client.columnar.state import INDEX
from backend_client.service.job_session import kept_client
from backend_client.service.log_writer import LogWriter
from backend_client.service.partition_table import open_partition
from backend_client.settings import BackendSettings
from backend_client.state.expiry import EXPIRY
from backend_client.state.key_hash import KeyHash, key_group_of
from backend_client.state.timers import BY_KEY, BY_TIME
from dstl_service.wire import ChangeSetRef, CheckpointRef, LogTarget, OperatorInfo, StateInfo
from storage.errors import CorruptDataError
from storage.key_groups import KeyGroupRange, key_group_range

REWRITTEN = "partition int, entries long, refs string"
"""Schema of the output, a row for each table: the references of its change sets, which are durable, are JSON."""

_ROW = pa.schema([("partition", pa.int32()), ("entries", pa.int64()), ("refs", pa.string())])
_BUFFERED_BYTES_MAX = 64 << 20
"""Most bytes of entries that a task holds: then it sends the largest of the change sets that are not full."""
_HEAD_BYTES, _MOMENT_BYTES, _ID_BYTES = 4, 8, 2
_ENTRY_BYTES = 100
"""About what an entry takes in memory beside its bytes."""


class NewKeys:
    """
    Gives the table keys of an operator the key groups of another number of them.

    Args:
        key_schema: Spark's JSON text of the struct of the key columns.
        states: The operator's state variables.
        before: The number of key groups that the table's keys have.
        after: The other one.

    Raises:
        InvalidInputError: A key column has a type whose hash only Spark knows.
    """

    def __init__(self, key_schema: str, states: Mapping[str, StateInfo], before: int, after: int) -> None:
        self._hash = KeyHash(key_schema)
        self._begins = _key_begins(states)
        self._before, self._after = before, after
        self._key, self._group, self._head = b"", -1, b""

    def __call__(self, entry: bytes) -> tuple[int, bytes]:
        """
        Return the entry's new key group and table key.

        Raises:
            CorruptDataError: It is no entry of this operator, or its key group is not that of its key.
        """
        begin = self._begins.get(entry[2:_HEAD_BYTES])
        if begin is None:
            raise CorruptDataError(f"the stored entry {entry[:40]!r} is of an unknown state variable")
        key = self._key
        # No key is a prefix of another one; the entries of a list or map have the same key one after the other.
        if not key or entry[begin : begin + len(key)] != key:
            self._take(entry, begin)
        if entry[:2] != self._head:
            raise CorruptDataError(
                f"the stored entry {entry[:40]!r} has key group {int.from_bytes(entry[:2], 'big')} of {self._before}, "
                f"its key's is {int.from_bytes(self._head, 'big')}"
            )
        return self._group, self._group.to_bytes(2, "big") + entry[2:]

    def _take(self, entry: bytes, begin: int) -> None:
        try:
            self._key, hashed = self._hash.first(entry[begin:])
        except ValueError as error:
            raise CorruptDataError(f"the key of the stored entry {entry[:40]!r} cannot be read: {error}") from error
        self._group = key_group_of(hashed, self._after)
        self._head = key_group_of(hashed, self._before).to_bytes(2, "big")


def _key_begins(states: Mapping[str, StateInfo]) -> dict[bytes, int]:
    """Return where the grouping key begins in table keys, by the two bytes of the variable's number."""
    by_moment = _HEAD_BYTES + _MOMENT_BYTES
    begins = {info.id: by_moment if info.kind == INDEX else _HEAD_BYTES for info in states.values()}
    begins |= {BY_KEY: _HEAD_BYTES, BY_TIME: by_moment, EXPIRY: by_moment + _ID_BYTES}
    return {number.to_bytes(2, "big"): begin for number, begin in begins.items()}


class _RangeWriter:
    """
    Collects entries by ranges of key groups, and sends them as change sets of one writer.

    Args:
        settings: The job's settings.
        target: The writer's log.
        ranges: Number of ranges.
        max_parallelism: Number of key groups.
    """

    def __init__(self, settings: BackendSettings, target: LogTarget, ranges: int, max_parallelism: int) -> None:
        self._client = kept_client(settings)
        self._set_bytes = settings.preemptive_bytes
        self._target = target
        self._ranges = ranges
        self._max_parallelism = max_parallelism
        self._changes: list[dict[bytes, bytes | None]] = [{} for _ in range(ranges)]
        self._bytes = [0] * ranges
        self._all_bytes = 0
        self._refs: list[ChangeSetRef] = []

    def put(self, key_group: int, key: bytes, value: bytes) -> None:
        """Add an entry; no key comes twice."""
        at = key_group * self._ranges // self._max_parallelism
        size = len(key) + len(value) + _ENTRY_BYTES
        self._changes[at][key] = value
        self._bytes[at] += size
        self._all_bytes += size
        if self._bytes[at] >= self._set_bytes:
            self._send(at)
        elif self._all_bytes >= _BUFFERED_BYTES_MAX:
            self._send(max(range(self._ranges), key=self._bytes.__getitem__))

    def end(self) -> list[ChangeSetRef]:
        """Send what is left; return the references of all change sets when they are durable."""
        for at in range(self._ranges):
            self._send(at)
        whole = LogWriter(self._client, self._target)
        whole.refs = self._refs
        whole.make_durable()
        return whole.refs

    def _send(self, at: int) -> None:
        owned = key_group_range(at, self._ranges, self._max_parallelism)
        writer = LogWriter(self._client, replace(self._target, key_groups=owned), first_sqn=len(self._refs))
        writer.append(self._changes[at], preemptive=True)
        self._refs += writer.refs
        self._all_bytes -= self._bytes[at]
        self._changes[at], self._bytes[at] = {}, 0


@dataclass(frozen=True, slots=True)
class TableRewriting:
    """
    The function that ``mapInArrow`` runs: its input's only column has the numbers of the partitions to rewrite.

    Args:
        settings: The job's settings.
        job_uid: The job's uid.
        epoch: The driver's epoch.
        base: The checkpoint whose tables are rewritten; the next one has the result.
        operator: The operator, as that checkpoint describes it.
        table: The name of its new table.
        before: The number of key groups that its tables have.
        after: The number that they get.
        ranges: Into how many ranges of key groups each task divides what it writes.
    """

    settings: BackendSettings
    job_uid: str
    epoch: int
    base: CheckpointRef
    operator: OperatorInfo
    table: str
    before: int
    after: int
    ranges: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rewrite the tables of these partitions."""
        context = TaskContext.get()
        assert context is not None
        for batch in batches:
            for partition in batch.column(0).to_pylist():
                entries, refs = self._rewrite(partition, context.taskAttemptId())
                row = {"partition": partition, "entries": entries, "refs": json.dumps([asdict(ref) for ref in refs])}
                yield pa.RecordBatch.from_pylist([row], _ROW)

    def _rewrite(self, partition: int, attempt: int) -> tuple[int, list[ChangeSetRef]]:
        operator, settings = self.operator, self.settings
        key_groups = key_group_range(partition, operator.parallelism, self.before)
        every = KeyGroupRange(0, self.after - 1)
        checkpoint_id = self.base.id + 1
        target = LogTarget(settings.job, self.table, checkpoint_id, self.epoch, attempt, partition, every, self.job_uid)
        writer = _RangeWriter(settings, target, self.ranges, self.after)
        new_keys = NewKeys(operator.key_schema, operator.states, self.before, self.after)
        entries = 0
        table, _ = open_partition(settings, self.job_uid, operator.name, key_groups, self.base)
        try:
            for entry, value in table.items():
                if key_groups.contains(int.from_bytes(entry[:2], "big")):
                    writer.put(*new_keys(entry), value)
                    entries += 1
            return entries, writer.end()
        finally:
            table.discard()  # it is not opened again, but by a repetition
            table.close()
