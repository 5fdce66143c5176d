"""Routes that open links between a job's hosts and its coordinator, see `dstl_service.links`."""

from __future__ import annotations

from fastapi import APIRouter, Request

from dstl_service.http.requests import JobName, ServiceParts
from dstl_service.wire import LinkAddress, Linked, OpenLinks, SilentHosts
from storage.errors import InvalidInputError

router = APIRouter(prefix="/v1/jobs/{job}", tags=["links"])


@router.post("/link-address")
async def open_links(job: JobName, body: OpenLinks, request: Request, parts: ServiceParts) -> LinkAddress:
    """Accept links of the sidecars on other hosts of a job; asked again, the same driver gets the same address."""
    _check_is_local(request)
    return await parts.links.open(job, body)


@router.post("/links")
async def connect(job: JobName, body: LinkAddress, request: Request, parts: ServiceParts) -> Linked:
    """Connect this sidecar to the coordinator of a job, and answer within seconds; it goes on trying meanwhile."""
    _check_is_local(request)
    return await parts.links.connect(job, body)


@router.get("/silent-hosts")
async def silent_hosts(job: JobName, parts: ServiceParts) -> SilentHosts:
    """List the hosts that stopped sending without closing their link to this coordinator: cut off, or hanging."""
    return parts.links.silent_hosts(job)


def _check_is_local(request: Request) -> None:
    # Callers from other hosts could have this service listen, or try which addresses it reaches.
    if request.app.state.settings.socket_path is None:
        raise InvalidInputError("links are for sidecars on Unix sockets; one on TCP needs advertised_url instead")
