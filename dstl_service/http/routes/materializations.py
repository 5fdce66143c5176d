"""The route to which tasks post snapshots of their tables."""

from __future__ import annotations

from pathlib import PurePosixPath

from fastapi import APIRouter, Request, status

from dstl_service.http.access_middleware import IDENTITY
from dstl_service.http.errors import NotAllowedError
from dstl_service.http.requests import JobName, ServiceParts
from dstl_service.wire import CheckpointRef, SnapshotRequest
from storage.key_groups import KeyGroupRange

router = APIRouter(prefix="/v1/jobs/{job}/materializations", tags=["materializations"])


@router.post("", status_code=status.HTTP_202_ACCEPTED)
async def materialize(job: JobName, body: SnapshotRequest, request: Request, parts: ServiceParts) -> dict[str, str]:
    """
    Take over the folder of a snapshot on this host: it is stored in the background, then removed.

    The folder must hold nothing but a table's files, belong to the service's own user and, if the service is set so,
    lie below a certain folder; for a caller with less than all rights, it must lie where the job's own tables do.
    Sending the same one again is harmless.
    """
    key_groups = KeyGroupRange(body.first_key_group, body.last_key_group)
    is_limited = not request.scope[IDENTITY].is_unlimited
    if is_limited:
        # Tables of all jobs share a folder, so the posted path alone proves nothing.
        own = ((await parts.jobs.opened(job)).store.job_uid, body.operator, key_groups.to_text())
        if PurePosixPath(body.path).parts[-4:-1] != own or ".." in body.path:
            raise NotAllowedError(f"folder {body.path[:300]!r} is not below the tables of job {job!r}", job=job)
    version = CheckpointRef.parse(body.version)
    await parts.restores.take_snapshot(job, body.operator, key_groups, version, body.path, is_own=is_limited)
    return {"status": "accepted"}
