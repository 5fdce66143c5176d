"""
``make load`` and ``make load-web``: starts the service under load, and locust against it.

Without SERVICE, a service process on a Unix socket, in front of a VersityGW of its own (STORAGE=s3, the default) or of
a temporary folder (STORAGE=file). Locust's table goes to the terminal, its CSV files and its page to ``reports/load``,
and the figures to ``reports/load.json``.

Exit codes: 0; 1 if a request failed or, with STRICT=1, a goal was missed; 2 if it could not start.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from loadtest.load.settings import REPORT_VARIABLE, SERVICE_PID_VARIABLE, LoadSettings
from storage.errors import DstlError
from tools.reporting.figures import format_number
from tools.reporting.target import TargetReport, is_set
from tools.servers.programs import ServerError
from tools.servers.s3_server import S3Server
from tools.servers.service_process import ServiceProcess

_BUCKET = "load"
_STOP_TIMEOUT_S = 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the load test; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.load", description="Load the changelog service.")
    parser.add_argument("--web", action="store_true", help="start from locust's web page, on loopback")
    parser.add_argument("--web-port", type=int, default=8089, help="its port (default %(default)s)")
    parser.add_argument(
        "--reports", type=Path, default=Path("reports"), help="folder for reports (default %(default)s)"
    )
    options = parser.parse_args(arguments)
    report = TargetReport("load", options.reports).path  # locust's process writes it
    try:
        settings = LoadSettings.of(os.environ)
        with ExitStack() as stack:
            environment = {} if settings.service else stack.enter_context(_Service(settings.storage)).environment
            code = _run_locust(options, settings, environment, report)
    except (DstlError, ServerError) as error:
        sys.stderr.write(f"load: {error}\n")
        return 2
    return code if options.web else _conclude(report, code)


class _Service(ExitStack):
    """The service process under load unless SERVICE names one, with its storage."""

    def __init__(self, storage: str) -> None:
        super().__init__()
        self._storage = storage
        self.environment: dict[str, str] = {}
        """Environment variables by which locust's process finds it."""

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            if self._storage == "s3":
                server = self.enter_context(S3Server())
                server.create_bucket(_BUCKET)
                process = ServiceProcess(f"s3://{_BUCKET}/state", server.env())
            else:
                folder = self.enter_context(tempfile.TemporaryDirectory(prefix="dstl-load-"))
                process = ServiceProcess(f"file://{folder}")
            self.enter_context(process)
            self.environment = {"SERVICE": process.address, SERVICE_PID_VARIABLE: str(process.pid)}
        except BaseException:
            self.close()
            raise
        return self


def _run_locust(options: argparse.Namespace, settings: LoadSettings, variables: Mapping[str, str], report: Path) -> int:
    folder: Path = options.reports / "load"
    folder.mkdir(parents=True, exist_ok=True)
    users = str(settings.hosts + 1)  # and the driver
    command = [sys.executable, "-m", "locust", "--locustfile", str(Path(__file__).with_name("locustfile.py"))]
    command += ["--users", users, "--spawn-rate", users, "--stop-timeout", str(_STOP_TIMEOUT_S)]
    command += ["--csv", str(folder / "load"), "--html", str(folder / "load.html")]
    environment = {**os.environ, **variables}
    if options.web:
        command += ["--web-host", "127.0.0.1", "--web-port", str(options.web_port)]
        print(f"http://127.0.0.1:{options.web_port}  (Ctrl-C stops it)", flush=True)
    else:
        command += ["--headless", "--only-summary"]
        environment[REPORT_VARIABLE] = str(report.absolute())
    with subprocess.Popen(command, env=environment) as process:
        while process.returncode is None:
            with suppress(KeyboardInterrupt):  # locust receives it too, and stops itself
                process.wait()
        return process.returncode


def _conclude(report: Path, locust_code: int) -> int:
    """Print the figures; return the exit code."""
    if not report.exists():
        sys.stderr.write("load: stopped before its end, so there are no figures\n")
        return locust_code or 1
    rows = json.loads(report.read_text(encoding="utf-8"))
    for row in rows:
        mark = {True: "  holds", False: "  MISSED", None: ""}[row["holds"]]
        goal = f"  (goal {row['goal']})" if row["goal"] else ""
        print(f"{row['name']:34} {format_number(row['value']):>10} {row['unit']}{goal}{mark}")
    return int(locust_code != 0 or (is_set("STRICT") and any(row["holds"] is False for row in rows)))


if __name__ == "__main__":
    sys.exit(main())
