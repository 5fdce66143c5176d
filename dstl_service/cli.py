"""The command ``dstl``: ``serve`` runs the service; the others work on a job's storage."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime

import uvicorn

from dstl_service import __version__
from dstl_service.access.audit import AuditTrail, this_user
from dstl_service.access.callers import identified
from dstl_service.access.certificates import server_context
from dstl_service.app import create_app
from dstl_service.checkpoints.rewind import describe_rewind, rewind
from dstl_service.collection.garbage_collector import collect_garbage
from dstl_service.collection.tombstones import Deletions, Tombstone
from dstl_service.http.connections import Bounds, Connections, open_files_max
from dstl_service.http.http_protocol import protocol_of
from dstl_service.http.listening import ListenAddress, describe, open_listener
from dstl_service.http.shutdown import StoppingServer
from dstl_service.process.logs import LogLimiter, configure_logging
from dstl_service.process.memory import freeze_heap, reuse_freed_memory
from dstl_service.registry.job_store import MAX_PARALLELISM_DEFAULT, JobStore
from dstl_service.registry.jobs import delete_job, has_leftovers, job_names
from dstl_service.repair.fsck import check_job
from dstl_service.repair.rebuild import describe_rebuild, rebuild_registry
from dstl_service.service import ChangelogService
from dstl_service.settings import ServiceSettings
from dstl_service.settings_sources import known_settings, load_settings
from storage.clock import SystemClock, SystemIds
from storage.errors import ConflictError, DstlError, InvalidInputError, NotFoundError
from storage.model import validate_name
from storage.object_store import ObjectStore
from storage.open import open_store

_DELETING = "dstl delete"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        result: int = options.run(options)
    except DstlError as error:
        sys.stderr.write(f"dstl: {error}\n")
        return 2
    return result


def serve(options: argparse.Namespace) -> int:
    """Run the service until it is told to stop."""
    settings = _settings(options)
    configure_logging(settings.log_level, settings.log_file, settings.log_file_bytes_max)
    reuse_freed_memory()
    app = create_app(settings, open_store(settings.storage, **settings.store_options()))
    freeze_heap()
    listener = open_listener(ListenAddress(settings.socket_path, settings.host, settings.port, settings.trust))
    tls = settings.tls
    if settings.socket_path is None:
        sys.stdout.write(f"listening on {describe(listener, tls=tls.certificate_file is not None)}\n")
        sys.stdout.flush()
    guard = Connections(_bounds_of(settings), LogLimiter(SystemClock()))
    config = uvicorn.Config(
        app,
        http=identified(protocol_of(guard), settings.trust),
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nothing here depends on who a proxy says has asked
        timeout_keep_alive=settings.http.idle_timeout_s,
        server_header=False,
    )
    if tls.certificate_file is not None:
        config.load()
        config.ssl = server_context(tls, SystemClock())

    def begin_stop() -> None:
        service: ChangelogService = app.state.service  # there since the application began
        service.begin_stop()

    server = StoppingServer(config, begin_stop, settings.shutdown_timeout_s, guard)
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return 0


def _bounds_of(settings: ServiceSettings) -> Bounds:
    given = settings.http
    return Bounds(
        min(given.connections_max, max(1, open_files_max() // 2)),
        given.head_timeout_s,
        given.body_grace_s,
        given.body_bytes_per_s_min,
    )


def list_checkpoints(options: argparse.Namespace) -> int:
    """Print a job's checkpoints, oldest first, one a line or as JSON."""
    _, jobs = _open_job(options)
    for manifest in jobs.completed():
        info = manifest.info()
        row = {
            "checkpoint": info.ref.to_text(),
            "kind": manifest.kind.value,
            "epoch": info.epoch,
            "created": datetime.fromtimestamp(info.created_ms / 1000, UTC).isoformat(timespec="milliseconds"),
            "segments": info.segments,
            "segment_bytes": info.segment_bytes,
        }
        sys.stdout.write((json.dumps(row) if options.json else "  ".join(str(value) for value in row.values())) + "\n")
    return 0


def collect(options: argparse.Namespace) -> int:
    """Print a job's orphans and, unless it is a dry run, delete them."""
    settings = _settings(options)
    store, jobs = _open_job(options)
    tombstone = _deletions(store).of(options.job)
    if tombstone is not None:
        return _collect_deleted(options, store, tombstone)
    if options.delete:
        jobs.open(None)  # it does what a rewind left undone, in the job's name
    age_min_s = settings.gc.age_min_s if options.age_min_s is None else options.age_min_s
    report = collect_garbage(
        store,
        jobs,
        options.job,
        SystemClock(),
        age_min_ms=age_min_s * 1000,
        checkpoints_max=settings.retention.checkpoints_max,
        dry_run=not options.delete,
    )
    for key in report.orphans:
        sys.stdout.write(f"{key}\n")
    sys.stdout.write(
        f"{report.objects} objects, {report.named} named by checkpoints, {report.young} too young to tell; "
        f"{report.subsumed} manifests of subsumed checkpoints and {len(report.orphans)} orphans of "
        f"{report.orphan_bytes} bytes {'deleted' if options.delete else 'found'}\n"
    )
    if options.delete:
        _record(store, "collect garbage", options.job, orphans=str(len(report.orphans)))
    return 0


def _collect_deleted(options: argparse.Namespace, store: ObjectStore, tombstone: Tombstone) -> int:
    """Delete the objects of a deleted job if that cannot be undone any more."""
    is_due = tombstone.until_ms <= SystemClock().now_ms()
    removal = _deletions(store).collect(tombstone) if options.delete and is_due else None
    if removal is None:
        sys.stdout.write(f"job {options.job} {tombstone.text}\n")
        return 0
    _record(store, "collect deleted job", options.job, objects=str(removal.objects))
    sys.stdout.write(f"job {options.job} was deleted, and {removal.objects} objects of it are gone\n")
    return 0


def check(options: argparse.Namespace) -> int:
    """Verify a job's stored state, or rebuild its registry; print what is wrong; return 1 if something is."""
    settings = _settings(options)
    store = open_store(settings.storage, **settings.store_options())
    if options.rebuild or options.write or options.up_to is not None:
        return rebuild(options, store)
    report = check_job(store, options.job)
    if options.json:
        sys.stdout.write(json.dumps(asdict(report)) + "\n")
        return 1 if report.problems else 0
    for problem in report.problems:
        sys.stdout.write(f"{problem}\n")
    sys.stdout.write(
        f"{report.checkpoints} checkpoints, {report.segments} segments in {report.objects} objects, "
        f"{report.bytes_read} bytes verified, {len(report.problems)} problems\n"
    )
    return 1 if report.problems else 0


def rebuild(options: argparse.Namespace, store: ObjectStore) -> int:
    """Rebuild a job's registry, or say what would be done; return 1 if it needs to be and was not."""
    report = rebuild_registry(store, options.job, SystemClock(), SystemIds(), up_to=options.up_to, write=options.write)
    if report.is_written:
        _record(store, "rebuild", options.job)
    sys.stdout.write((json.dumps(asdict(report)) if options.json else describe_rebuild(report)) + "\n")
    return 1 if report.registry_problems and not report.is_written else 0


def savepoints(options: argparse.Namespace) -> int:
    """Make or delete a savepoint, if asked to; then print all."""
    store, jobs = _open_job(options)
    jobs.open(None)
    if options.delete is not None:
        jobs.savepoints.delete(options.delete)
        _record(store, "delete savepoint", options.job, savepoint=options.delete)
    if options.create is not None:
        _deletions(store).check(options.job)
        jobs.make_savepoint(options.create, options.checkpoint)
        _record(store, "create savepoint", options.job, savepoint=options.create)
    for name, manifest in jobs.savepoints.all():
        sys.stdout.write(f"{name}  {manifest.ref.to_text()}\n")
    return 0


def list_jobs(options: argparse.Namespace) -> int:
    """Print the names of all jobs of a storage."""
    settings = _settings(options)
    store = open_store(settings.storage, **settings.store_options())
    deletions = _deletions(store)
    deleted = {tombstone.job for tombstone in deletions.all()}
    for name in job_names(store):
        tombstone = deletions.of(name) if name in deleted else None
        sys.stdout.write(f"{name}  {tombstone.text}\n" if tombstone is not None else f"{name}\n")
    return 0


def delete(options: argparse.Namespace) -> int:
    """Delete a job, at once or so that it can be undone; or say how much there is of it."""
    if (left := _leftovers(options)) is not None:
        return left
    store, jobs = _open_job(options)
    if not options.write:
        found = delete_job(store, options.job)
        sys.stdout.write(
            f"job {found.job}: {found.objects} objects of {found.size_bytes} bytes would be deleted. "
            "Stop the query; --write does it\n"
        )
        return 0
    deletions = _deletions(store)
    tombstone = deletions.of(options.job)
    if tombstone is None:
        tombstone = deletions.bury(options.job, this_user(), _settings(options).deletion.delay_s)
    _fence(jobs)
    _record(store, "delete", options.job, now=str(options.now))
    if not options.now:
        sys.stdout.write(
            f"job {options.job} {tombstone.text}, with `dstl undelete`; then its objects go, and its name is free\n"
        )
        return 0
    removal = deletions.collect(tombstone)
    if removal is None:
        raise ConflictError(f"somebody brought job {options.job!r} back meanwhile")
    sys.stdout.write(f"job {removal.job}: {removal.objects} objects of {removal.size_bytes} bytes deleted\n")
    return 0


def _fence(job_store: JobStore) -> None:
    """Let a query that runs all the same stop with its next checkpoint; where that cannot be, say so."""
    if not job_store.exists():  # a collector deleted all but the tombstone
        return
    try:
        job_store.open(None)
        job_store.claim(_DELETING)
    except DstlError as error:
        sys.stderr.write(f"dstl: warning: a query that still runs is not stopped by this: {error}\n")


def undelete(options: argparse.Namespace) -> int:
    """Bring a deleted job back."""
    store, _ = _open_job(options)
    _deletions(store).undo(options.job)
    _record(store, "undelete", options.job)
    sys.stdout.write(f"job {options.job} is back as it was: its query can be started\n")
    return 0


def audit(options: argparse.Namespace) -> int:
    """Print who did what to a job, oldest first; also to one that is gone."""
    settings = _settings(options)
    store = open_store(settings.storage, **settings.store_options())
    for entry in AuditTrail(store, SystemClock(), SystemIds()).entries(validate_name("job", options.job)):
        at = datetime.fromtimestamp(entry.at_ms / 1000, UTC).isoformat(timespec="milliseconds")
        facts = "  ".join(f"{name}={text}" for name, text in entry.facts.items())
        row = f"{at}  {entry.who}  {entry.act}  {facts}".rstrip()
        sys.stdout.write((json.dumps({**asdict(entry), "at": at}) if options.json else row) + "\n")
    return 0


def _leftovers(options: argparse.Namespace) -> int | None:
    """Delete what is there of a job that was never created, or say how much that is; None if there is a job."""
    settings = _settings(options)
    store = open_store(settings.storage, **settings.store_options())
    validate_name("job", options.job)
    is_job = JobStore(store, options.job, SystemClock(), SystemIds()).exists()
    if is_job or _deletions(store).of(options.job) is not None or not has_leftovers(store, options.job):
        return None
    removal = (
        _deletions(store).clear(options.job, this_user(), MAX_PARALLELISM_DEFAULT)
        if options.write
        else delete_job(store, options.job)
    )
    sys.stdout.write(
        f"job {options.job} has no job.json: it was never created, or its registry is lost, and `dstl fsck --rebuild` "
        f"says what could be brought back; {removal.objects} objects of {removal.size_bytes} bytes "
        f"{'deleted' if options.write else 'would be deleted, for good: --write does it'}\n"
    )
    return 0


def set_back(options: argparse.Namespace) -> int:
    """Set a job back to a savepoint or checkpoint, or say what would be done."""
    store, jobs = _open_job(options)
    _deletions(store).check(options.job)
    jobs.open(None)
    report = rewind(
        jobs,
        options.job,
        SystemIds(),
        savepoint=options.savepoint,
        checkpoint_id=options.checkpoint,
        checkpoints_max=_settings(options).retention.checkpoints_max,
        write=options.write,
    )
    if report.is_written:
        _record(store, "rewind", options.job, target=report.target, newest=report.newest)
    sys.stdout.write((json.dumps(asdict(report)) if options.json else describe_rewind(report)) + "\n")
    return 0


def _deletions(store: ObjectStore) -> Deletions:
    return Deletions(store, SystemClock(), SystemIds())


def _record(store: ObjectStore, act: str, job: str, **facts: str) -> None:
    """Put on record what was done without a service, by this process's user."""
    trail = AuditTrail(store, SystemClock(), SystemIds())
    trail.record(this_user(), act, job, **facts)
    if trail.failures:
        sys.stderr.write(f"dstl: warning: {act!r} could not be put on record in the store\n")


def _settings(options: argparse.Namespace) -> ServiceSettings:
    """Join what the command line says (its options are named like the settings) with the other sources."""
    given: dict[str, str | None] = {path: getattr(options, path, None) for path in known_settings()}
    for assignment in options.set:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise InvalidInputError(f"--set {assignment} has no value; the form is --set batch.delay_ms=20")
        setting = known_settings().get(path)
        if setting is not None and setting.is_secret:
            sys.stderr.write(
                f"dstl: warning: every user of this host can see {path} on the command line; "
                f"{setting.variable} in the environment, or a file, keeps it\n"
            )
        given[path] = text
    return load_settings(given, config_path=options.config)


def _open_job(options: argparse.Namespace) -> tuple[ObjectStore, JobStore]:
    settings = _settings(options)
    store = open_store(settings.storage, **settings.store_options())
    jobs = JobStore(store, options.job, SystemClock(), SystemIds())
    if not jobs.exists() and _deletions(store).of(options.job) is None:
        left = " (there are objects of that name: see `dstl fsck --rebuild`, or `dstl delete`)"
        raise NotFoundError(
            f"there is no job {options.job!r} in {settings.storage}{left if has_leftovers(store, options.job) else ''}"
        )
    return store, jobs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dstl", description="State changelog service for PySpark.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", metavar="FILE", help="settings file in TOML (default: DSTL_CONFIG)")
    common.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="any setting, such as batch.delay_ms=20"
    )
    common.add_argument("--storage", help="file:///path or s3://bucket/prefix")
    run = commands.add_parser("serve", parents=[common], help="run the service on this host")
    run.add_argument("--socket", dest="socket_path", metavar="PATH", help="Unix socket to listen on")
    run.add_argument("--host", help="TCP address, without --socket (default: 127.0.0.1)")
    run.add_argument("--port", help="TCP port, without --socket (default: any free one)")
    run.add_argument("--token-file", metavar="PATH", help="file with the token that requests must carry")
    run.add_argument(
        "--advertise", dest="advertised_url", metavar="URL", help="URL under which other hosts reach this service"
    )
    run.add_argument("--host-id", help="names this host in object keys (default: from the host's name)")
    run.add_argument("--log-file", metavar="PATH", help="log to this file, which is rotated (default: standard error)")
    run.add_argument("--idle-exit-s", help="stop after this time without a request (default: never)")
    run.set_defaults(run=serve)
    jobs = commands.add_parser("jobs", parents=[common], help="list the jobs of a storage")
    jobs.set_defaults(run=list_jobs)
    listing = commands.add_parser("checkpoints", parents=[common], help="list a job's checkpoints")
    listing.add_argument("--json", action="store_true", help="one JSON document per line")
    listing.add_argument("job")
    listing.set_defaults(run=list_checkpoints)
    garbage = commands.add_parser("gc", parents=[common], help="find objects that no checkpoint names, and delete them")
    garbage.add_argument("--delete", action="store_true", help="delete them; without it they are only listed")
    garbage.add_argument(
        "--age-min-s",
        type=int,
        help="leave younger objects alone (default: the setting gc.age_min_s); any age is safe, also while a query of "
        "the job runs; temporary files of the store stay 30 minutes regardless",
    )
    garbage.add_argument("job")
    garbage.set_defaults(run=collect)
    keep = commands.add_parser("savepoints", parents=[common], help="list, make and delete a job's savepoints")
    keep.add_argument("--create", metavar="NAME", help="keep a checkpoint under this name until it is deleted")
    keep.add_argument("--checkpoint", type=int, metavar="ID", help="which checkpoint to keep (default: the newest)")
    keep.add_argument("--delete", metavar="NAME", help="delete the savepoint of this name")
    keep.add_argument("job")
    keep.set_defaults(run=savepoints)
    end = commands.add_parser(
        "delete", parents=[common], help="delete a job; its objects go when that cannot be undone any more"
    )
    end.add_argument("--write", action="store_true", help="do it; without it only say how much there is")
    end.add_argument(
        "--now",
        action="store_true",
        help="delete the objects at once, for good, also where a collector that was killed left a rest",
    )
    end.add_argument("job")
    end.set_defaults(run=delete)
    again = commands.add_parser("undelete", parents=[common], help="bring a deleted job back, within deletion.delay_s")
    again.add_argument("job")
    again.set_defaults(run=undelete)
    record = commands.add_parser("audit", parents=[common], help="print who did what to a job")
    record.add_argument("--json", action="store_true", help="one JSON document per line")
    record.add_argument("job")
    record.set_defaults(run=audit)
    back = commands.add_parser(
        "rewind", parents=[common], help="set a job back to a savepoint or checkpoint; its query follows when it starts"
    )
    back.add_argument("--savepoint", metavar="NAME", help="the savepoint to set it back to")
    back.add_argument("--checkpoint", type=int, metavar="ID", help="the retained checkpoint to set it back to")
    back.add_argument("--write", action="store_true", help="do it; without it only say what would be done")
    back.add_argument("--json", action="store_true", help="report as a JSON document")
    back.add_argument("job")
    back.set_defaults(run=set_back)
    verify = commands.add_parser(
        "fsck", parents=[common], help="verify manifests, objects and checksums of a job; rebuild its registry"
    )
    verify.add_argument("--json", action="store_true", help="report as a JSON document")
    verify.add_argument(
        "--rebuild",
        action="store_true",
        help="say to which checkpoint a job can be brought back whose registry is lost or damaged",
    )
    verify.add_argument("--write", action="store_true", help="with --rebuild: bring it back")
    verify.add_argument("--up-to", type=int, metavar="ID", help="with --rebuild: to no newer checkpoint than this one")
    verify.add_argument("job")
    verify.set_defaults(run=check)
    return parser
