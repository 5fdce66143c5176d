"""The fields that the manifest, the note and a rebuild's candidate of a checkpoint share. No I/O."""

from __future__ import annotations

from typing import Protocol, TypedDict

from dstl_service.wire import CheckpointRef, ForkOrigin, OperatorInfo


class CheckpointHeader(TypedDict):
    """
    The fields that describe a checkpoint apart from its state, as keyword arguments.

    Args:
        uid: Uid of its manifest.
        epoch: Epoch of the driver that makes it.
        base: The checkpoint before.
        query_id: Spark's query id.
        offsets: Spark's offsets entry of the batch.
        operators: The operators whose state it has.
        closed_ms: The watermark at which the batch was closed, see `dstl_service.wire.CheckpointInfo`.
        rewound_from: The checkpoint that the job was rewound from, to this one.
        forked_from: Where the job began, if it is a fork.
    """

    uid: str
    epoch: int
    base: CheckpointRef | None
    query_id: str
    offsets: str
    operators: tuple[OperatorInfo, ...]
    closed_ms: int | None
    rewound_from: CheckpointRef | None
    forked_from: ForkOrigin | None


class DescribesCheckpoint(Protocol):
    """A value with the fields of `CheckpointHeader`."""

    @property
    def uid(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def base(self) -> CheckpointRef | None: ...
    @property
    def query_id(self) -> str: ...
    @property
    def offsets(self) -> str: ...
    @property
    def operators(self) -> tuple[OperatorInfo, ...]: ...
    @property
    def closed_ms(self) -> int | None: ...
    @property
    def rewound_from(self) -> CheckpointRef | None: ...
    @property
    def forked_from(self) -> ForkOrigin | None: ...


def header_of(described: DescribesCheckpoint) -> CheckpointHeader:
    """Return the header of a description."""
    return CheckpointHeader(
        uid=described.uid,
        epoch=described.epoch,
        base=described.base,
        query_id=described.query_id,
        offsets=described.offsets,
        operators=described.operators,
        closed_ms=described.closed_ms,
        rewound_from=described.rewound_from,
        forked_from=described.forked_from,
    )
