"""Routes about the process and about whole jobs: health, who answers, taking a job over."""

from __future__ import annotations

import os

from fastapi import APIRouter, Request, Response, status

from dstl_service import __version__
from dstl_service.collection.garbage_collector import GarbageReport
from dstl_service.http.requests import JobName, Service
from dstl_service.metrics.service import CONTENT_TYPE
from dstl_service.wire import BatchFigures, JobInfo, OpenedJob, OpenJob, ServiceInfo

router = APIRouter(tags=["jobs"])


@router.get("/health")
async def health() -> dict[str, str | int]:
    """The process is alive; asks nothing of the storage."""
    return {"status": "alive", "pid": os.getpid()}


@router.get("/ready")
async def ready(service: Service) -> dict[str, str]:
    """The storage can be written; 503 or 400 with the reason if it cannot."""
    await service.check_storage()
    return {"status": "ready"}


@router.get("/v1/info")
async def info(request: Request, service: Service) -> ServiceInfo:
    """Who answers here, and for which storage."""
    settings = request.app.state.settings
    return ServiceInfo(
        service_id=service.service_id,
        host_id=settings.host_id,
        version=__version__,
        storage=settings.storage,
        pid=os.getpid(),
        advertised_url=settings.advertised_url,
        jobs=service.job_names,
    )


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(service: Service) -> Response:
    """Metrics in Prometheus' text form; see `dstl_service.metrics.service`."""
    return Response(service.metrics.render(), media_type=CONTENT_TYPE)


@router.post("/v1/jobs/{job}/garbage-collection")
async def collect_garbage(job: JobName, service: Service, dry_run: bool = True) -> GarbageReport:
    """Report segment objects that no checkpoint names and that are old enough; delete them with `dry_run` false."""
    return await service.collect_garbage(job, dry_run=dry_run)


@router.post("/v1/jobs/{job}/batches", status_code=status.HTTP_204_NO_CONTENT)
async def count_batch(job: JobName, body: BatchFigures, service: Service) -> None:
    """Count a finished batch of a job that this coordinator has opened, for the metrics."""
    await service.count_batch(job, body)


@router.get("/v1/jobs/{job}")
async def show_job(job: JobName, service: Service) -> JobInfo:
    """Show a job and its newest checkpoint without taking it over."""
    return await service.job(job)


@router.post("/v1/jobs/{job}/epochs")
async def open_job(job: JobName, body: OpenJob, service: Service) -> OpenedJob:
    """Take a job over with a new epoch. Every older driver of the job is fenced from then on."""
    return await service.open_job(job, body)
