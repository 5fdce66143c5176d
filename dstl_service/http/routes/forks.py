"""The route of forks: create a job that begins with another one's state."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from dstl_service.checkpoints.fork import ForkReport
from dstl_service.http.acts import Acts
from dstl_service.http.requests import JobName, ServiceParts
from dstl_service.wire import NAME_PATTERN, ForkRequest

router = APIRouter(prefix="/v1/jobs/{job}/forks", tags=["forks"])

_ForkName = Annotated[str, Path(pattern=NAME_PATTERN, description="Name of the new job.")]


@router.post("/{fork}")
async def fork_job(job: JobName, fork: _ForkName, body: ForkRequest, parts: ServiceParts, acts: Acts) -> ForkReport:
    """Create a job that begins with this one's state, by default at its newest checkpoint; may be repeated."""
    made = await parts.catalog.fork(job, fork, body)
    acts.record("fork", job, fork=fork, checkpoint=made.checkpoint)
    acts.record("begin as a fork", fork, parent=job, checkpoint=made.checkpoint)
    return made
