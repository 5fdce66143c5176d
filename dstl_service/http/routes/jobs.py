"""Routes of the process and of whole jobs: health, information, metrics, taking a job over."""

from __future__ import annotations

import os
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response, status
from prometheus_client import CONTENT_TYPE_LATEST

from dstl_service import __version__
from dstl_service.collection.garbage_collector import GarbageReport
from dstl_service.http.acts import Acts
from dstl_service.http.errors import WITH_MODEL
from dstl_service.http.requests import JobName, ServiceParts
from dstl_service.wire import (
    NAME_PATTERN,
    BatchFigures,
    JobInfo,
    OpenedJob,
    OpenJob,
    ParallelismRequest,
    ServiceInfo,
)

router = APIRouter(tags=["jobs"])

_OperatorName = Annotated[str, Path(pattern=NAME_PATTERN, description="Name of the operator.")]


@router.get("/health", responses=WITH_MODEL)
async def health() -> dict[str, str | int]:
    """Answer if the process runs; the storage is not asked."""
    return {"status": "alive", "pid": os.getpid()}


@router.get("/ready")
async def ready(parts: ServiceParts) -> dict[str, str]:
    """Answer if the storage can be written; else 503 or 400 with the reason."""
    await parts.probe.ask()
    return {"status": "ready"}


@router.get("/v1/info")
async def info(request: Request, parts: ServiceParts) -> ServiceInfo:
    """Describe the service that answers, and its storage."""
    settings = request.app.state.settings
    return ServiceInfo(
        service_id=parts.service_id,
        host_id=settings.host_id,
        version=__version__,
        storage=settings.storage,
        pid=os.getpid(),
        advertised_url=settings.advertised_url,
        jobs=parts.jobs.names,
    )


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(parts: ServiceParts) -> Response:
    """Metrics in Prometheus' text form; see `dstl_service.metrics.service`."""
    return Response(parts.metrics.render(), media_type=CONTENT_TYPE_LATEST)


@router.post("/v1/jobs/{job}/garbage-collection")
async def collect_garbage(job: JobName, parts: ServiceParts, acts: Acts, dry_run: bool = True) -> GarbageReport:
    """List the objects that no checkpoint names and that are old enough; delete them if `dry_run` is false."""
    report = await parts.background_work.collect(await parts.jobs.stored(job), dry_run=dry_run)
    if not dry_run:
        acts.record("collect garbage", job)
    return report


@router.put("/v1/jobs/{job}/operators/{operator}/parallelism")
async def request_parallelism(
    job: JobName, operator: _OperatorName, body: ParallelismRequest, parts: ServiceParts, acts: Acts
) -> dict[str, int]:
    """Have the running query change an operator's parallelism; returns all such requests since the query started."""
    wanted = await parts.requested_parallelism.request(await parts.jobs.stored(job), operator, body.parallelism)
    acts.record("rescale", job, operator=operator, parallelism=body.parallelism)
    return {name: one.parallelism for name, one in wanted.items()}


@router.post("/v1/jobs/{job}/batches", status_code=status.HTTP_204_NO_CONTENT)
async def count_batch(job: JobName, body: BatchFigures, parts: ServiceParts) -> None:
    """Count a finished batch of a job that this coordinator has opened, for the metrics."""
    await parts.jobs.opened(job)
    parts.metrics.batches.observe(job, body)


@router.get("/v1/jobs/{job}")
async def show_job(job: JobName, parts: ServiceParts) -> JobInfo:
    """Show a job and its newest checkpoint without taking it over."""
    return await parts.catalog.job(job)


@router.post("/v1/jobs/{job}/epochs")
async def open_job(job: JobName, body: OpenJob, parts: ServiceParts, acts: Acts) -> OpenedJob:
    """Take a job over with a new epoch. Every older driver of the job is fenced from then on."""
    opened = await parts.opener.open(job, body)
    acts.record("open", job)
    return opened
