"""The arguments of the command ``dstl``: a parser with one subcommand per function of this package."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from dstl_service import __version__
from dstl_service.commands.checkpoints import fork, list_checkpoints, list_losses, savepoints, set_back
from dstl_service.commands.jobs import audit, delete, list_jobs, rescale, undelete
from dstl_service.commands.repair import check, collect

_Run = Callable[[argparse.Namespace], int]
"""Runs a command; returns its exit code."""

_LINES = "one JSON document per line"
_REPORT = "report as a JSON document"


class _Commands:
    """
    The subcommands of a parser, in the order in which they are added.

    Args:
        parser: The parser of ``dstl`` itself.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._commands = parser.add_subparsers(required=True, metavar="command")
        self._common = argparse.ArgumentParser(add_help=False)
        self._common.add_argument(
            "--config", metavar="FILE", help="settings file in TOML (default: that of DSTL_CONFIG)"
        )
        self._common.add_argument(
            "--set", action="append", default=[], metavar="NAME=VALUE", help="any setting, such as batch.delay_ms=20"
        )
        self._common.add_argument("--storage", help="file:///path or s3://bucket/prefix")

    def add(self, name: str, run: _Run, says: str, description: str | None = None) -> argparse.ArgumentParser:
        """
        Add a command with the arguments that all have.

        Args:
            name: Its name.
            run: Runs it.
            says: Its line in the list of commands.
            description: The first lines of its own help.
        """
        command: argparse.ArgumentParser = self._commands.add_parser(
            name,
            parents=[self._common],
            help=says,
            description=description,
            allow_abbrev=False,  # `--d` must not be `--delete`, nor become another option in another version
        )
        command.set_defaults(run=run)
        return command

    def add_for_job(
        self, name: str, run: _Run, says: str, description: str | None = None, job_help: str | None = None
    ) -> argparse.ArgumentParser:
        """Add a command on one job, whose name is its first argument; `job_help` says which job."""
        command = self.add(name, run, says, description)
        command.add_argument("job", help=job_help)
        return command


def parser() -> argparse.ArgumentParser:
    """Return the parser; `run` of what it parses is the command's function."""
    made = argparse.ArgumentParser(
        prog="dstl",
        description="State changelog service for PySpark.",
        allow_abbrev=False,
    )
    made.add_argument("--version", action="version", version=__version__)
    commands = _Commands(made)
    _serve_arguments(commands)
    commands.add("jobs", list_jobs, "list the jobs of a storage")
    _listing_arguments(commands)
    _gc_arguments(commands)
    _savepoints_arguments(commands)
    _deletion_arguments(commands)
    _audit_arguments(commands)
    _rewind_arguments(commands)
    _fork_arguments(commands)
    _rescale_arguments(commands)
    _fsck_arguments(commands)
    return made


def _serve(options: argparse.Namespace) -> int:
    """Run the service. Only this command needs the modules of the HTTP API, which take longer than all others."""
    from dstl_service.commands.serve import serve

    return serve(options)


def _serve_arguments(commands: _Commands) -> None:
    run = commands.add("serve", _serve, "run the service on this host")
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


def _listing_arguments(commands: _Commands) -> None:
    checkpoints = commands.add_for_job(
        "checkpoints",
        list_checkpoints,
        "list a job's checkpoints",
        description="List a job's checkpoints, oldest first, one per line: name, kind, epoch, time, number of segments "
        "and their bytes, what was published, set aside, renamed or removed, and the offsets of the sources. --json "
        "names the columns.",
    )
    checkpoints.add_argument("--json", action="store_true", help=_LINES)
    losses = commands.add_for_job("losses", list_losses, "list the rows that a job has set aside and not run")
    losses.add_argument("--json", action="store_true", help=_LINES)


def _gc_arguments(commands: _Commands) -> None:
    gc = commands.add_for_job("gc", collect, "list or delete objects that no checkpoint names")
    gc.add_argument("--delete", action="store_true", help="delete the objects; without it, only list them")
    gc.add_argument(
        "--age-min-s",
        type=int,
        help="skip younger objects (default: the setting gc.age_min_s); any age is safe, also while a query of the job "
        "runs; temporary files of the store are kept for 30 minutes regardless",
    )


def _savepoints_arguments(commands: _Commands) -> None:
    keep = commands.add_for_job("savepoints", savepoints, "list, create and delete a job's savepoints")
    # One of them could fail after the other: a savepoint would be gone, and the command's error about something else.
    act = keep.add_mutually_exclusive_group()
    act.add_argument("--create", metavar="NAME", help="keep a checkpoint under this name until it is deleted")
    act.add_argument("--delete", metavar="NAME", help="delete the savepoint of this name")
    keep.add_argument(
        "--checkpoint", type=int, metavar="ID", help="with --create: which checkpoint to keep (default: the newest)"
    )


def _deletion_arguments(commands: _Commands) -> None:
    end = commands.add_for_job(
        "delete", delete, "delete a job; its objects are deleted once that can no longer be undone"
    )
    end.add_argument("--write", action="store_true", help="delete the job; without it, only report its size")
    end.add_argument(
        "--now",
        action="store_true",
        help="delete the objects at once, for good; also finishes a deletion that was killed",
    )
    commands.add_for_job("undelete", undelete, "bring a deleted job back, within deletion.delay_s")


def _audit_arguments(commands: _Commands) -> None:
    trail = commands.add_for_job("audit", audit, "print the audit log of a job")
    trail.add_argument("--json", action="store_true", help=_LINES)


def _rewind_arguments(commands: _Commands) -> None:
    back = commands.add_for_job(
        "rewind", set_back, "rewind a job to a savepoint or checkpoint; its query follows when it starts"
    )
    back.add_argument("--savepoint", metavar="NAME", help="the savepoint to rewind to")
    back.add_argument("--checkpoint", type=int, metavar="ID", help="the retained checkpoint to rewind to")
    back.add_argument("--write", action="store_true", help="rewind the job; without it, only report what would be done")
    back.add_argument("--json", action="store_true", help=_REPORT)


def _fork_arguments(commands: _Commands) -> None:
    split = commands.add_for_job(
        "fork",
        fork,
        "create a job that begins with the state of another one, without copying it",
        job_help="the parent, which may keep running",
    )
    split.add_argument("--savepoint", metavar="NAME", help="the savepoint at which it begins")
    split.add_argument("--checkpoint", type=int, metavar="ID", help="the retained checkpoint (default: the newest)")
    split.add_argument(
        "--max-parallelism",
        type=int,
        metavar="N",
        help="the new job's number of key groups: its first start rewrites the state (default: the parent's)",
    )
    split.add_argument("--json", action="store_true", help=_REPORT)
    split.add_argument("fork", help="the name of the new job")


def _rescale_arguments(commands: _Commands) -> None:
    scale = commands.add_for_job(
        "rescale", rescale, "have a running query change the number of an operator's partitions"
    )
    scale.add_argument("operator")
    scale.add_argument("parallelism", type=int, help="the new number, 1 to the job's max_parallelism")


def _fsck_arguments(commands: _Commands) -> None:
    verify = commands.add_for_job(
        "fsck", check, "verify manifests, objects and checksums of a job, or rebuild its registry"
    )
    verify.add_argument("--json", action="store_true", help=_REPORT)
    verify.add_argument(
        "--rebuild",
        action="store_true",
        help="report to which checkpoint a job with a lost or damaged registry can be restored",
    )
    verify.add_argument("--write", action="store_true", help="with --rebuild: rebuild the registry")
    verify.add_argument(
        "--up-to", type=int, metavar="ID", help="with --rebuild: restore this checkpoint or an older one"
    )
