"""
How long a partition's task waits for its table, and what may become of its rows. No I/O.

A table that is not ready soon is restored beside the batches, and its partition is *stalled* until then. In a batch
that must be exact, only a partition with nothing to do goes without its table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from backend_client.failover.set_aside_entries import Waiting


@dataclass(frozen=True, slots=True)
class Patience:
    """
    How long a task waits for its table, in seconds; with 0 it does not try.

    With `sets_aside` rows that came are then set aside; else a task with rows waits as long as it takes.
    """

    seconds: float
    sets_aside: bool


@dataclass(frozen=True, slots=True)
class PartitionState:
    """
    A partition, as known when a batch begins.

    Args:
        has_waiting: Whether rows or times of earlier batches wait for it.
        is_idle: Whether it is certain that nothing is due in it in this batch.
        is_restoring: Whether its table is being restored beside the batches.
        stalled_s: For how many seconds its rows have been set aside; 0 if they are not.
    """

    has_waiting: bool = False
    is_idle: bool = False
    is_restoring: bool = False
    stalled_s: float = 0.0


def patience(state: PartitionState, patience_s: float, max_stall_s: float, *, is_exact: bool) -> Patience | None:
    """
    Return a partition's patience in a batch; None: its task waits as long as it takes.

    Args:
        state: The partition.
        patience_s: How long a task waits for its table.
        max_stall_s: After this time, a stalled partition's batch waits.
        is_exact: Whether the batch waits for all partitions with something to do.
    """
    seconds = 0.0 if state.is_restoring else patience_s
    if not is_exact and state.stalled_s < max_stall_s:
        return Patience(seconds, sets_aside=True)
    if state.is_idle and not state.has_waiting:
        return Patience(seconds, sets_aside=False)
    return None


@dataclass(frozen=True, slots=True)
class TaskFailover:
    """
    The instructions for an operator's tasks while tables are being restored.

    Args:
        companion: Name of the operator's companion in the log.
        patience: By partition; a task of any other waits as long as it takes.
        waiting: By partition, what it has to run before its own rows, in order of arrival.
    """

    companion: str = ""
    patience: Mapping[int, Patience] = field(default_factory=dict)
    waiting: Mapping[int, Waiting] = field(default_factory=dict)
