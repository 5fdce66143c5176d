"""A job whose registry is lost and made again from the notes of its checkpoints."""

from __future__ import annotations

from pathlib import Path

from dstl_service.formats.manifest import Manifest
from dstl_service.registry.job_store import JobStore
from dstl_service.repair.fsck import check_job
from dstl_service.repair.rebuild import rebuild_registry
from storage.clock import SystemClock, SystemIds
from storage.open import open_store
from tools.servers.service.process import ServiceProcess


def newest_after_a_rebuild(service: ServiceProcess, folder: Path) -> Manifest:
    """Delete the registry of job ``job`` in a stopped service's storage, rebuild it, start again; return the newest."""
    service.stop()
    store = open_store(folder.as_uri())
    for name in ("job.json", "epochs/", "checkpoints/"):
        store.delete([info.key for info in store.list(f"job/{name}")])
    rebuild_registry(store, "job", SystemClock(), SystemIds(), write=True)
    assert check_job(store, "job").problems == []
    service.start()
    jobs = JobStore(store, "job", SystemClock(), SystemIds())
    jobs.open(None)
    newest = jobs.newest()
    assert newest is not None
    return newest
