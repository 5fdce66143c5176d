"""
Rows that are set aside, in the log: as Arrow batches, as they came, and in their order.

A partition's rows of a batch are change sets of one writer of the operator's companion, in the form of logged output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
import pyarrow as pa

from backend_client.key_group_sql import HASH_BITS
from backend_client.service.client import ServiceClient
from backend_client.service.log_writer import LogWriter
from backend_client.service.output_log import read_rows
from backend_client.sinks.records import change_sets, record_batches
from dstl_service.wire import CheckpointRef, RowsSetAside
from storage.errors import CorruptDataError
from storage.key_groups import KeyGroupRange


def log_rows(
    batches: Iterable[pa.RecordBatch], key_groups: KeyGroupRange, epoch: int, writer: LogWriter, set_bytes: int
) -> int:
    """
    Write rows to the log; return their number.

    Args:
        batches: The rows.
        key_groups: The key groups of their partition.
        epoch: The driver's epoch.
        writer: Writes to the log of the operator's companion.
        set_bytes: About the size of a change set.
    """
    count = 0
    for changes, rows in change_sets(batches, key_groups.first, epoch, set_bytes):
        writer.append(changes, preemptive=sum(len(value or b"") for value in changes.values()) >= set_bytes)
        count += rows
    return count


def read_logged(
    client: ServiceClient,
    job: str,
    companion: str,
    key_groups: KeyGroupRange,
    entries: Sequence[RowsSetAside],
    base: CheckpointRef,
) -> Iterator[pa.RecordBatch]:
    """
    Return the rows that a partition has set aside in one batch and that are of these key groups, in their order.

    They are read at once, since the client serves one request at a time; a partition's rows of a batch are in memory.

    Args:
        client: The sidecar's client.
        job: Name of the job.
        companion: Name of the operator's companion.
        key_groups: Key groups of the partition that set them aside.
        entries: The entries of this batch and partition.
        base: The checkpoint that lists them.

    Raises:
        CorruptDataError: Rows are missing or damaged.
        UnavailableError: The sidecar or its store does not answer.
    """
    expected, of = sum(entry.rows for entry in entries), entries[0].key_groups
    if not expected:
        return iter(())
    checkpoint_id = entries[0].checkpoint_id
    batches = [
        batch
        for _, source, changes in read_rows(client, job, companion, of, base, checkpoint_id)
        for batch in record_batches(changes, source)
    ]
    found = sum(batch.num_rows for batch in batches)
    if found != expected:
        raise CorruptDataError(
            f"{companion} set {expected} rows aside in batch {checkpoint_id} for key groups {of.to_text()}, but the "
            f"log has {found} of them; run `dstl fsck`"
        )
    if key_groups.covers(of):
        return iter(batches)
    return (batch.filter(_are_of(batch, key_groups)) for batch in batches)


def _are_of(batch: pa.RecordBatch, key_groups: KeyGroupRange) -> pa.Array:
    """Return which rows are of these key groups; the first column is their order number."""
    groups = batch.column(0).to_numpy() >> HASH_BITS
    return pa.array(np.logical_and(groups >= key_groups.first, groups <= key_groups.last))


def with_rows(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch] | None:
    """Return the batches from the first one with rows on; None if there are no rows."""
    left = iter(batches)
    first = next((batch for batch in left if batch.num_rows), None)
    return None if first is None else chain([first], left)
