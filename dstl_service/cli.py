"""The command ``dstl``: ``serve`` runs the service; the other commands work on the storage."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from dstl_service import __version__
from dstl_service.commands.checkpoints import fork, list_checkpoints, list_losses, savepoints, set_back
from dstl_service.commands.common import UnwrittenOutputError, complain, end_output
from dstl_service.commands.jobs import audit, delete, list_jobs, rescale, undelete
from dstl_service.commands.repair import check, collect
from storage.errors import DstlError
from storage.validation import validate_name

_INTERRUPTED, _UNREAD = 130, 141
"""Exit codes as a shell has them for SIGINT and SIGPIPE."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        if "job" in options:  # a longer path, such as that of a job's life, would show a job where none is
            validate_name("job", options.job)
        result: int = options.run(options)
        end_output()
    except DstlError as error:
        complain(str(error))
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
    except UnwrittenOutputError as error:
        return _unwritten(error.reason)
    return result


def _unwritten(error: OSError) -> int:
    """Return the exit code where the output cannot be written, and keep Python from trying again at its end."""
    if not isinstance(error, BrokenPipeError):  # whose reader, such as `head`, has enough
        complain(f"the output cannot be written: {error.strerror or error}")
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _UNREAD if isinstance(error, BrokenPipeError) else 2


def _serve(options: argparse.Namespace) -> int:
    """Run the service. Only this command needs the modules of the HTTP API, which take longer than all others."""
    from dstl_service.commands.serve import serve

    return serve(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dstl", description="State changelog service for PySpark.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", metavar="FILE", help="settings file in TOML (default: that of DSTL_CONFIG)")
    common.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="any setting, such as batch.delay_ms=20"
    )
    common.add_argument("--storage", help="file:///path or s3://bucket/prefix")
    run = commands.add_parser("serve", parents=[common], help="run the service on this host")
    run.add_argument("--socket", dest="socket_path", metavar="PATH", help="Unix socket to listen on")
    run.add_argument("--host", help="TCP address, without --socket (default: 127.0.0.1)")
    run.add_argument("--port", help="TCP port, without --socket (default: a free one)")
    run.add_argument("--token-file", metavar="PATH", help="file with the tokens of which requests must carry one")
    run.add_argument(
        "--advertise", dest="advertised_url", metavar="URL", help="URL under which other hosts reach this service"
    )
    run.add_argument("--host-id", help="name of this host in object keys (default: from the host's name)")
    run.add_argument("--log-file", metavar="PATH", help="log file, which is rotated (default: standard error)")
    run.add_argument("--idle-exit-s", help="stop after this time without a request (default: never)")
    run.set_defaults(run=_serve)
    jobs = commands.add_parser("jobs", parents=[common], help="list the jobs of a storage")
    jobs.set_defaults(run=list_jobs)
    listing = commands.add_parser(
        "checkpoints",
        parents=[common],
        help="list a job's checkpoints",
        description="List a job's checkpoints, oldest first, one per line: name, kind, epoch, time, number of segments "
        "and their bytes, what was published, set aside, renamed or removed, and the offsets of the sources. --json "
        "names the columns.",
    )
    listing.add_argument("--json", action="store_true", help="one JSON document per line")
    listing.add_argument("job")
    listing.set_defaults(run=list_checkpoints)
    lost = commands.add_parser("losses", parents=[common], help="list the rows that a job has set aside and not run")
    lost.add_argument("--json", action="store_true", help="one JSON document per line")
    lost.add_argument("job")
    lost.set_defaults(run=list_losses)
    garbage = commands.add_parser("gc", parents=[common], help="list or delete objects that no checkpoint names")
    garbage.add_argument("--delete", action="store_true", help="delete the objects; without it, only list them")
    garbage.add_argument(
        "--age-min-s",
        type=int,
        help="skip younger objects (default: the setting gc.age_min_s); any age is safe, also while a query of the job "
        "runs; temporary files of the store are kept for 30 minutes regardless",
    )
    garbage.add_argument("job")
    garbage.set_defaults(run=collect)
    keep = commands.add_parser("savepoints", parents=[common], help="list, create and delete a job's savepoints")
    keep.add_argument("--create", metavar="NAME", help="keep a checkpoint under this name until it is deleted")
    keep.add_argument("--checkpoint", type=int, metavar="ID", help="which checkpoint to keep (default: the newest)")
    keep.add_argument("--delete", metavar="NAME", help="delete the savepoint of this name")
    keep.add_argument("job")
    keep.set_defaults(run=savepoints)
    end = commands.add_parser(
        "delete", parents=[common], help="delete a job; its objects are deleted once that can no longer be undone"
    )
    end.add_argument("--write", action="store_true", help="delete the job; without it, only report its size")
    end.add_argument(
        "--now",
        action="store_true",
        help="delete the objects at once, for good; also finishes a deletion that was killed",
    )
    end.add_argument("job")
    end.set_defaults(run=delete)
    again = commands.add_parser("undelete", parents=[common], help="bring a deleted job back, within deletion.delay_s")
    again.add_argument("job")
    again.set_defaults(run=undelete)
    record = commands.add_parser("audit", parents=[common], help="print the audit log of a job")
    record.add_argument("--json", action="store_true", help="one JSON document per line")
    record.add_argument("job")
    record.set_defaults(run=audit)
    back = commands.add_parser(
        "rewind", parents=[common], help="rewind a job to a savepoint or checkpoint; its query follows when it starts"
    )
    back.add_argument("--savepoint", metavar="NAME", help="the savepoint to rewind to")
    back.add_argument("--checkpoint", type=int, metavar="ID", help="the retained checkpoint to rewind to")
    back.add_argument("--write", action="store_true", help="rewind the job; without it, only report what would be done")
    back.add_argument("--json", action="store_true", help="report as a JSON document")
    back.add_argument("job")
    back.set_defaults(run=set_back)
    split = commands.add_parser(
        "fork", parents=[common], help="create a job that begins with the state of another one, without a copy of it"
    )
    split.add_argument("--savepoint", metavar="NAME", help="the savepoint at which it begins")
    split.add_argument("--checkpoint", type=int, metavar="ID", help="the retained checkpoint (default: the newest)")
    split.add_argument(
        "--max-parallelism",
        type=int,
        metavar="N",
        help="the new job's number of key groups: its first start rewrites the state (default: the parent's)",
    )
    split.add_argument("--json", action="store_true", help="report as a JSON document")
    split.add_argument("job", help="the parent, which may be running, and goes on")
    split.add_argument("fork", help="the name of the new job")
    split.set_defaults(run=fork)
    scale = commands.add_parser(
        "rescale", parents=[common], help="have a running query change the number of an operator's partitions"
    )
    scale.add_argument("job")
    scale.add_argument("operator")
    scale.add_argument("parallelism", type=int, help="the new number, 1 to the job's max_parallelism")
    scale.set_defaults(run=rescale)
    verify = commands.add_parser(
        "fsck", parents=[common], help="verify manifests, objects and checksums of a job, or rebuild its registry"
    )
    verify.add_argument("--json", action="store_true", help="report as a JSON document")
    verify.add_argument(
        "--rebuild",
        action="store_true",
        help="report to which checkpoint a job with a lost or damaged registry can be restored",
    )
    verify.add_argument("--write", action="store_true", help="with --rebuild: rebuild the registry")
    verify.add_argument("--up-to", type=int, metavar="ID", help="with --rebuild: restore at most this checkpoint")
    verify.add_argument("job")
    verify.set_defaults(run=check)
    return parser
