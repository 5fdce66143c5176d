"""The route by which tasks hand over snapshots of their tables."""

from __future__ import annotations

from fastapi import APIRouter, status

from dstl_service.routes.common import JobName, Service
from dstl_service.wire import CheckpointRef, SnapshotRequest
from storage.model import KeyGroupRange

router = APIRouter(prefix="/v1/jobs/{job}/materializations", tags=["materializations"])


@router.post("", status_code=status.HTTP_202_ACCEPTED)
async def materialize(job: JobName, body: SnapshotRequest, service: Service) -> dict[str, str]:
    """
    Take over the folder of a snapshot on this host: it is stored in the background, then removed.

    The folder must hold nothing but a table's files, belong to the service's own user and, if the service is set so,
    lie below a certain folder. Sending the same one again is harmless.
    """
    key_groups = KeyGroupRange(body.first_key_group, body.last_key_group)
    await service.take_snapshot(job, body.operator, key_groups, CheckpointRef.parse(body.version), body.path)
    return {"status": "accepted"}
