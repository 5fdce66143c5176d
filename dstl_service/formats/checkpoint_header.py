"""The fields that the manifest, the note and a rebuild's candidate of a checkpoint share. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from dstl_service.wire import CheckpointRef, ForkOrigin, OperatorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointHeader:
    """
    What describes a checkpoint apart from its state.

    Args:
        uid: Uid of its manifest.
        epoch: Epoch of the driver that makes it.
        base: The checkpoint before.
        query_id: Spark's query id.
        offsets: Spark's offsets entry of the batch.
        operators: The operators whose state it has.
        closed_ms: The watermark at which the batch was closed, see `dstl_service.wire.CheckpointInfo`.
        rewound_from: The checkpoint that the job was rewound from, to this one (`dstl_service.checkpoints.rewind`).
        forked_from: Where the job began, in each checkpoint of a fork; its objects may be those of other jobs.
    """

    uid: str
    epoch: int
    base: CheckpointRef | None = None
    query_id: str = ""
    offsets: str = ""
    operators: tuple[OperatorInfo, ...] = ()
    closed_ms: int | None = None
    rewound_from: CheckpointRef | None = None
    forked_from: ForkOrigin | None = None


def base_from_json(text: str | None, checkpoint_id: int) -> CheckpointRef | None:
    """
    Read the checkpoint before one of this id; None for none.

    Raises:
        ValueError: It is not a checkpoint before: readers that follow forged bases would come to no end.
    """
    base = CheckpointRef.parse(text) if text else None
    if base is not None and base.id >= checkpoint_id:
        raise ValueError(f"its base {base.to_text()} is not before it")
    return base


def header_of(described: CheckpointHeader) -> dict[str, Any]:
    """Return the header of a description, as keyword arguments of another one."""
    return {field.name: getattr(described, field.name) for field in fields(CheckpointHeader)}
