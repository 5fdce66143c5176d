"""
Links between the hosts of a job: opens them, and carries out the requests that come over them.

The other side of a link is another host of the same job. It may have sets of this job persisted, and nothing else.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import TypeAdapter, ValidationError

from dstl_service.intake.active_jobs import ActiveJobs
from dstl_service.intake.persister import Persister
from dstl_service.links.calls import LinkCalls
from dstl_service.links.dialer import LinkDialer
from dstl_service.links.frames import Message
from dstl_service.links.hub import LinkHub
from dstl_service.wire import LinkAddress, Linked, OpenLinks, PersistRequest, SilentHosts
from storage.errors import InvalidInputError

_PERSIST: TypeAdapter[PersistRequest] = TypeAdapter(PersistRequest)


class LinkService:
    """
    Opens links and answers requests on them.

    Args:
        jobs: The jobs of this process.
        persister: Makes change sets durable.
        hub: Accepts links of other hosts.
        dialer: Connects to coordinators.
        calls: Calls hosts that have links.
    """

    def __init__(
        self,
        jobs: ActiveJobs,
        persister: Persister,
        hub: LinkHub,
        dialer: LinkDialer,
        calls: LinkCalls,
    ) -> None:
        self._jobs = jobs
        self._persister = persister
        self._hub = hub
        self._dialer = dialer
        self._calls = calls

    async def open(self, job: str, request: OpenLinks) -> LinkAddress:
        """
        Return the address to which the hosts of a job connect; listen there if nothing does yet.

        Raises:
            FencedError: Another driver took the job over.
            InvalidInputError: The address cannot be listened on.
        """
        await self._jobs.owned(job, request.epoch)
        return await self._hub.open(job, request)

    def silent_hosts(self, job: str) -> SilentHosts:
        """Return the hosts of a job that stopped sending without closing their link."""
        return SilentHosts(self._hub.silent_hosts(job))

    async def connect(self, job: str, address: LinkAddress) -> Linked:
        """
        Connect this host to a job's coordinator, unless it is; the coordinator itself needs no link.

        Raises:
            InvalidInputError: The address's certificate is none.
        """
        if self._hub.accepts_at(address):
            return Linked(self._hub.service_id)
        return await self._dialer.ensure(job, address)

    async def answer(self, job: str, body: Message) -> Message:
        """
        Carry out a request of another host.

        Raises:
            InvalidInputError: The request is malformed.
            DstlError: As `Persister.persist`.
        """
        try:
            request = _PERSIST.validate_python(body.get("persist"))
        except ValidationError as error:
            raise InvalidInputError(f"a request over a link has {error.error_count()} errors") from None
        # A link leads to sets of this host, or from here to hosts with links, but never to addresses in a request.
        refs = [replace(ref, service_url=None) for ref in request.refs]
        persisted = await self._persister.persist_claimed(job, refs, wait=request.wait, note=request.note)
        return {"handles": [handle.to_dict() for handle in persisted.all_handles]}

    @property
    def is_linked(self) -> bool:
        """Say whether this host has a link to a coordinator, which may need it."""
        return self._dialer.is_linked

    async def close(self) -> None:
        """End all links."""
        self._calls.close()
        await self._dialer.close()
        await self._hub.close()
