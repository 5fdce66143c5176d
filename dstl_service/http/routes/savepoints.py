"""Routes of savepoints: create one from a retained checkpoint, list, delete."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, status

from dstl_service.http.acts import Acts
from dstl_service.http.requests import JobName, ServiceParts
from dstl_service.wire import NAME_PATTERN, CheckpointInfo, SavepointRequest

router = APIRouter(prefix="/v1/jobs/{job}/savepoints", tags=["savepoints"])

_SavepointName = Annotated[str, Path(pattern=NAME_PATTERN, description="Name of the savepoint.")]


@router.get("")
async def list_savepoints(job: JobName, parts: ServiceParts) -> dict[str, CheckpointInfo]:
    """All savepoints by name, with the checkpoints that they keep."""
    return await parts.catalog.savepoints(job)


@router.put("/{savepoint}")
async def create_savepoint(
    job: JobName, savepoint: _SavepointName, body: SavepointRequest, parts: ServiceParts, acts: Acts
) -> CheckpointInfo:
    """Keep a retained checkpoint, by default the newest, until the savepoint is deleted; may be repeated."""
    kept = await parts.catalog.create_savepoint(job, savepoint, body.checkpoint_id)
    acts.record("create savepoint", job, savepoint=savepoint)
    return kept


@router.delete("/{savepoint}", status_code=status.HTTP_204_NO_CONTENT)
async def delete_savepoint(job: JobName, savepoint: _SavepointName, parts: ServiceParts, acts: Acts) -> None:
    """Delete a savepoint; the next garbage collection deletes the objects that only it named."""
    await parts.catalog.delete_savepoint(job, savepoint)
    acts.record("delete savepoint", job, savepoint=savepoint)
