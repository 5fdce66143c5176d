"""Routes of the coordinator: begin, complete, abort, list and show checkpoints."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, status

from dstl_service.http.acts import Acts
from dstl_service.http.requests import CheckpointId, JobName, ServiceParts
from dstl_service.wire import REMOVED, BeginResponse, CheckpointInfo, CompleteRequest, CompleteResponse, EpochRequest

router = APIRouter(prefix="/v1/jobs/{job}/checkpoints", tags=["checkpoints"])


@router.get("")
async def list_checkpoints(job: JobName, parts: ServiceParts) -> list[CheckpointInfo]:
    """All completed checkpoints, oldest first."""
    return await parts.catalog.checkpoints(job)


@router.get("/{checkpoint_id}")
async def show_checkpoint(job: JobName, checkpoint_id: CheckpointId, parts: ServiceParts) -> dict[str, Any]:
    """Return one checkpoint, with the handles that it added."""
    manifest = await parts.catalog.checkpoint(job, checkpoint_id)
    info = manifest.info()
    return {
        "checkpoint": info.ref.to_text(),
        "base": info.base.to_text() if info.base else None,
        "kind": manifest.kind.value,
        "epoch": info.epoch,
        "created_ms": info.created_ms,
        "query_id": info.query_id,
        "offsets": info.offsets,
        "operators": {item.label: item.parallelism for item in info.operators if item.kind != REMOVED},
        "segment_bytes": info.segment_bytes,
        "handles": [handle.to_dict() for handle in manifest.segments],
    }


@router.post("/{checkpoint_id}/begin")
async def begin(job: JobName, checkpoint_id: CheckpointId, body: EpochRequest, parts: ServiceParts) -> BeginResponse:
    """Start a checkpoint; change sets of earlier tries at it are forgotten."""
    wanted = await parts.checkpointer.begin(job, checkpoint_id, body.epoch)
    numbers = {operator: one.parallelism for operator, one in wanted.items()}
    return BeginResponse(parts.service_id, numbers, {operator: one.request for operator, one in wanted.items()})


@router.post("/{checkpoint_id}/flush", status_code=status.HTTP_204_NO_CONTENT)
async def flush(job: JobName, checkpoint_id: CheckpointId, body: CompleteRequest, parts: ServiceParts) -> None:
    """Start the upload of the checkpoint's sets without waiting; the same request completes it later."""
    await parts.checkpointer.flush(job, checkpoint_id, body)


@router.post("/{checkpoint_id}/complete")
async def complete(
    job: JobName, checkpoint_id: CheckpointId, body: CompleteRequest, parts: ServiceParts
) -> CompleteResponse:
    """Wait until all sets are durable, then create the manifest: from then on the checkpoint exists."""
    return await parts.checkpointer.complete(job, checkpoint_id, body)


@router.post("/{checkpoint_id}/abort", status_code=status.HTTP_204_NO_CONTENT)
async def abort(job: JobName, checkpoint_id: CheckpointId, body: EpochRequest, parts: ServiceParts, acts: Acts) -> None:
    """Abort a checkpoint; its change sets are forgotten."""
    await parts.checkpointer.abort(job, checkpoint_id, body.epoch)
    acts.record("abort", job, checkpoint_id=checkpoint_id)
