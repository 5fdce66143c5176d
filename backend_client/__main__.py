"""``python -m backend_client``: commands for operators of Spark's drivers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from storage.errors import DstlError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m backend_client", description="Commands for Spark's drivers.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    archive = commands.add_parser(
        "class-archive",
        help="write an archive of classes with which drivers and executors start faster",
        description="Write an archive of classes with which drivers and executors start faster; takes about a minute.",
    )
    archive.add_argument("file", type=Path, help="the archive, about 170 MB")
    archive.add_argument("options", nargs="*", help="after --: spark-submit's options of the jobs, such as --packages")
    archive.set_defaults(run=_write_class_archive)
    recommended = commands.add_parser(
        "recommended-settings",
        help="print the settings of Spark for pinned partitions and fast recovery",
        description="Print the settings of Spark that a query on several hosts needs, as options of spark-submit.",
    )
    recommended.set_defaults(run=_print_recommended_settings)
    standby = commands.add_parser("standby", help="keep copies of tables; tasks start it where standby_replicas is set")
    standby.add_argument("folder", type=Path, help="the job's folder with orders, in local_dir")
    standby.set_defaults(run=_follow)
    options = parser.parse_args(arguments)
    return int(options.run(options))


def _follow(options: argparse.Namespace) -> int:
    from backend_client.standby.follower import run  # RocksDB takes a moment to import

    return run(options.folder)


def _print_recommended_settings(_: argparse.Namespace) -> int:
    """Print the options alone to the standard output, for ``spark-submit $(…)``; the reasons are for people."""
    from backend_client.spark.api.recommended_settings import recommended_settings  # PySpark takes a second to import

    reason = ""
    for one in recommended_settings():
        if one.reason != reason:
            reason = one.reason
            sys.stderr.write(f"# {reason}\n")
            sys.stderr.flush()
        sys.stdout.write(f"{one.option}\n")
        sys.stdout.flush()  # both in order on a terminal
    return 0


def _write_class_archive(options: argparse.Namespace) -> int:
    from backend_client.spark.api.class_archive import write_class_archive  # PySpark takes a second to import

    try:
        write_class_archive(options.file, options.options)
    except DstlError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(
        f"start Spark with: --driver-java-options -XX:SharedArchiveFile={options.file.absolute()}\n"
        "and, if executors have the file at the same path: "
        f"--conf spark.executor.extraJavaOptions=-XX:SharedArchiveFile={options.file.absolute()}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
