"""
Composes the parts of a service: the only module that knows the dependencies between parts.

Each part gets parts that were made before it. Only the room of change sets and the links call later parts, which are
themselves made with them. All state in the parts is a cache of the store or change sets that are not durable yet, so
the process may be killed at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar, TypeVarTuple

from dstl_service.checkpoints.catalog import Catalog
from dstl_service.checkpoints.checkpointer import Checkpointer
from dstl_service.checkpoints.fork import fork_job
from dstl_service.checkpoints.job_opener import JobOpener
from dstl_service.checkpoints.requested_parallelism import RequestedParallelism
from dstl_service.collection.background_work import BackgroundWork
from dstl_service.collection.tombstones import Deletions
from dstl_service.compaction.compactor import Compactor
from dstl_service.intake.active_jobs import ActiveJobs
from dstl_service.intake.handle_check import HandleCheck
from dstl_service.intake.in_flight_limiter import InFlightLimiter
from dstl_service.intake.intake import Intake
from dstl_service.intake.notes import NoteReader
from dstl_service.intake.persister import Persister
from dstl_service.link_service import LinkService
from dstl_service.links.calls import LinkCalls
from dstl_service.links.dialer import LinkDialer
from dstl_service.links.hub import LinkHub
from dstl_service.links.room import LinkRoom
from dstl_service.materialization.materializer import Materializer
from dstl_service.metrics.service import ServiceMetrics
from dstl_service.peers.addresses import Announcement, PeerRegistry
from dstl_service.peers.calls import PeerCalls
from dstl_service.peers.client import PeerClient
from dstl_service.process.fair_slots import FairSlots
from dstl_service.process.job_threads import NO_JOB, JobThreads, RunInThread
from dstl_service.process.shared_check import SharedCheck
from dstl_service.restore.download_cache import DownloadCache
from dstl_service.restore.read_ahead import ReadAhead
from dstl_service.restore.segment_cache import SegmentCache
from dstl_service.restore_service import RestoreService
from dstl_service.settings import ServiceSettings
from dstl_service.uploads.uploader import ThreadPerCall, Uploader
from storage.clock import Clock, IdSource
from storage.object_store import ObjectStore

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

_BACKGROUND_TIMEOUT_MS = 60_000


@dataclass(frozen=True, slots=True)
class Parts:
    """
    The parts of one service process, which the routes call. Owned by the event loop.

    Args:
        service_id: New with every start of a process.
        metrics: Shown at `/metrics`.
        store: The object store; closed with the parts.
        jobs: The jobs that this process has seen.
        opener: Takes jobs over.
        catalog: Reads stored jobs, checkpoints and savepoints, and forks jobs.
        intake: Takes change sets in.
        persister: Makes change sets durable.
        checkpointer: Completes checkpoints.
        requested_parallelism: Passes requests for a parallelism to drivers.
        restores: Advances tables to checkpoints.
        materializer: Stores snapshots of tables.
        background_work: Compacts and deletes after checkpoints.
        announcement: Announces this service's address to other hosts.
        links: Connects hosts without an address to the coordinators of their jobs.
        io_threads: Run blocking calls of jobs.
        notes: Parses the notes in requests.
        upload_threads: Run upload attempts.
        downloads: Downloads of immutable objects, on disk.
        probe: Writes and deletes an object at most once a second; raises what to do if the storage cannot be written.
    """

    service_id: str
    metrics: ServiceMetrics
    store: ObjectStore
    jobs: ActiveJobs
    opener: JobOpener
    catalog: Catalog
    intake: Intake
    persister: Persister
    checkpointer: Checkpointer
    requested_parallelism: RequestedParallelism
    restores: RestoreService
    materializer: Materializer
    background_work: BackgroundWork
    announcement: Announcement
    links: LinkService
    io_threads: JobThreads
    notes: NoteReader
    upload_threads: ThreadPerCall
    downloads: DownloadCache
    probe: SharedCheck

    @property
    def is_busy(self) -> bool:
        """Say whether background work runs, or another host may need this process."""
        return self.materializer.is_busy or self.background_work.is_busy or self.links.is_linked

    async def close(self) -> None:
        """Stop, wait for uploads within their share of `shutdown_timeout_s`, and release the threads."""
        self.background_work.close()
        await self.intake.stopped()
        await self.links.close()
        await self.materializer.close()
        self.intake.close()
        self.upload_threads.shutdown(wait=False, cancel_futures=True)
        self.io_threads.close()
        self.notes.close()
        self.restores.close()
        self.downloads.close()
        self.store.close()


def compose(settings: ServiceSettings, store: ObjectStore, clock: Clock, ids: IdSource, peers: PeerClient) -> Parts:
    """
    Make the parts of a service.

    Args:
        settings: Checked settings.
        store: The object store; `Parts.close` closes it.
        clock: The only source of time.
        ids: The only source of unique names.
        peers: Calls other services.
    """
    io_threads, upload_threads = JobThreads(settings.io_threads, "io"), ThreadPerCall("upload")
    in_thread, look = io_threads.run, _looks(io_threads.run, settings.io_threads)
    cache = SegmentCache(settings.cache.bytes_max)
    ahead = ReadAhead(settings.cache.parts_ahead)
    downloads = _downloads(settings, store, clock, ids, ahead)
    service_id, metrics = ids.unique_id(), ServiceMetrics()
    uploader = Uploader(
        store,
        upload_threads,
        settings.upload,
        ids,
        settings.host_id,
        slots=settings.upload.threads,
        hedge_share_max=settings.upload.hedge_share_max,
    )
    room = InFlightLimiter(
        settings.batch.in_flight_bytes_max,
        lambda job: jobs.in_flight_bytes_of(job),  # noqa: PLW0108 - made further down
        lambda: intake.flush_all(),  # noqa: PLW0108 - made further down
        metrics.intake.refused.inc,
    )
    jobs = ActiveJobs(store, clock, ids, settings.batch, room, in_thread, metrics.forget)
    announcement = Announcement(settings.advertised_url, store, partial(in_thread, NO_JOB), clock)
    intake = Intake(
        settings.intake, jobs, room, uploader, cache, clock, metrics.intake, service_id, lambda: announcement.url
    )
    calls = PeerCalls(
        peers,
        _peer_registry(settings, store, look, clock),
        ThreadPerCall("peer"),
        settings.peers.calls_max,
        settings.peers.calls_per_host_max,
        settings.peer_timeout_s,
    )
    room_of_links = LinkRoom()
    hub = LinkHub(service_id, lambda job, body: links.answer(job, body), room_of_links)  # noqa: PLW0108 - made further down
    dialer = LinkDialer(service_id, lambda job, body: links.answer(job, body), room_of_links)  # noqa: PLW0108 - likewise
    link_calls = LinkCalls(hub, dialer, settings.peer_timeout_s)
    notes = NoteReader()
    persister = Persister(intake, jobs, calls, link_calls, HandleCheck(store, look), notes, in_thread, service_id)
    links = LinkService(jobs, persister, hub, dialer, link_calls)
    metrics.watch(
        lambda: room.used_bytes,
        lambda: sum(job.book.queued for job in jobs),
        lambda: uploader.attempts_running,
        cache,
        downloads.figures,
    )
    materializer = Materializer(
        settings.materialization, store, clock, ids, ThreadPerCall("materialize"), metrics.registry
    )
    restores = RestoreService(
        jobs, persister, materializer, downloads, cache, ahead, clock, metrics.restores, in_thread
    )
    deletions = Deletions(store, clock, ids)
    patient = replace(settings.upload, timeout_ms=max(settings.upload.timeout_ms, _BACKGROUND_TIMEOUT_MS))
    background = Uploader(store, upload_threads, patient, ids, settings.host_id)
    compactor = Compactor(store, cache, background, in_thread, settings.compaction.base_bytes_max)
    background_work = BackgroundWork(
        settings.background_work, jobs, store, compactor, deletions, clock, ids, metrics.background_work, in_thread
    )
    wanted = RequestedParallelism(in_thread, clock)
    fork = partial(fork_job, store, clock=clock, ids=ids, checkpoints_max=settings.retention.checkpoints_max)
    return Parts(
        service_id=service_id,
        metrics=metrics,
        store=store,
        jobs=jobs,
        opener=JobOpener(jobs, store, deletions, background_work, in_thread, service_id),
        catalog=Catalog(jobs, in_thread, fork),
        intake=intake,
        persister=persister,
        checkpointer=Checkpointer(
            jobs, persister, materializer, background_work, wanted, clock, metrics.checkpoints, in_thread
        ),
        requested_parallelism=wanted,
        restores=restores,
        materializer=materializer,
        background_work=background_work,
        announcement=announcement,
        io_threads=io_threads,
        links=links,
        notes=notes,
        upload_threads=upload_threads,
        downloads=downloads,
        probe=SharedCheck(partial(in_thread, NO_JOB, store.check_writable), clock),
    )


def _downloads(
    settings: ServiceSettings, store: ObjectStore, clock: Clock, ids: IdSource, ahead: ReadAhead
) -> DownloadCache:
    cache = settings.cache
    bytes_max = cache.disk_bytes_max if settings.keeps_downloads else 0
    return DownloadCache(store, cache.folder, bytes_max, cache.idle_s, clock, ids, settings.trust, ahead=ahead)


def _peer_registry(settings: ServiceSettings, store: ObjectStore, look: RunInThread, clock: Clock) -> PeerRegistry:
    needs_tls = settings.tls.certificate_file is not None or settings.tls.ca_file is not None
    return PeerRegistry(settings.peers.allowed, store, look, clock, needs_tls=needs_tls)


def _looks(in_thread: RunInThread, threads: int) -> RunInThread:
    """Return a runner for store lookups of requests' claims, which takes at most half of the threads."""
    slots = FairSlots(max(1, threads // 2))

    async def look(job: str, function: Callable[[*_Args], _T], *args: *_Args) -> _T:
        async with slots.held(job):
            return await in_thread(job, function, *args)

    return look
