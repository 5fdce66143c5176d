"""
``make load`` and ``make load-web``: starts the service under load, and locust against it.

Without SERVICE, a service process on a Unix socket, in front of a VersityGW of its own (STORAGE=s3, the default) or of
a temporary folder (STORAGE=file). With STORE, a proxy between service and VersityGW lets requests go as at a store of
that profile. Locust's table goes to the terminal, its CSV files and its page to ``reports/load``, and the figures to
``reports/load.json``.

Exit codes: 0; 1 if a request failed, a threshold or, with STRICT=1, any goal was missed; 2 if it could not start; 3 if
the load generator was too busy for the run to count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from loadtest.load.result.figures import Samples, figures_of
from loadtest.load.result.thresholds import read_thresholds
from loadtest.load.result.verdict import NOT_STARTED, verdict
from loadtest.load.settings import REPORT_VARIABLE, SERVICE_PID_VARIABLE, STORE_VARIABLE, LoadSettings
from storage.errors import DstlError
from tools.reporting.figures import format_number
from tools.reporting.target import TargetReport, is_set
from tools.servers.faults.proxy import FaultProxy
from tools.servers.programs import ServerError
from tools.servers.s3_server import S3Server
from tools.servers.service.process import ServiceProcess

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
        settings.require_store()
        limited = _limited_figures(settings)
        with ExitStack() as stack:
            environment = {} if settings.service else stack.enter_context(_Service(settings)).environment
            code = _run_locust(options, settings, environment, report)
    except (DstlError, ServerError) as error:
        sys.stderr.write(f"load: {error}\n")
        return NOT_STARTED
    return code if options.web else _conclude(report, code, limited)


def _limited_figures(settings: LoadSettings) -> frozenset[str]:
    """Return the names of figures with a threshold; wrong ones are refused before anything starts."""
    if settings.thresholds is None:
        return frozenset()
    known = [figure.name for figure in figures_of(Samples(), settings, 0.0)]
    return frozenset(read_thresholds(settings.thresholds, known))


class _Service(ExitStack):
    """The service process under load unless SERVICE names one, with its storage."""

    def __init__(self, settings: LoadSettings) -> None:
        super().__init__()
        self._settings = settings
        self.environment: dict[str, str] = {}
        """Environment variables by which locust's process finds it."""

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            folder = self.enter_context(tempfile.TemporaryDirectory(prefix="dstl-load-"))
            if self._settings.storage == "s3":
                server = self.enter_context(S3Server())
                server.create_bucket(_BUCKET)
                process = ServiceProcess(f"s3://{_BUCKET}/state", server.env(self._endpoint_url(server, Path(folder))))
            else:
                process = ServiceProcess(f"file://{folder}")
            self.enter_context(process)
            self.environment |= {"SERVICE": process.address, SERVICE_PID_VARIABLE: str(process.pid)}
        except BaseException:
            self.close()
            raise
        return self

    def _endpoint_url(self, server: S3Server, folder: Path) -> str:
        """Return where the service finds the store."""
        if not self._settings.needs_proxy:
            return server.endpoint_url
        proxy = self.enter_context(FaultProxy(server.endpoint_url, folder))
        proxy.set_store(self._settings.store, self._settings.seed)
        self.environment[STORE_VARIABLE] = f"{proxy.address}:{proxy.port}"
        return proxy.endpoint_url


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


def _conclude(report: Path, locust_code: int, limited: Collection[str]) -> int:
    """Print the figures; return the exit code."""
    if not report.exists():
        sys.stderr.write("load: stopped before its end, so there are no figures\n")
        return locust_code or 1
    rows = json.loads(report.read_text(encoding="utf-8"))
    for row in rows:
        mark = {True: "  holds", False: "  MISSED", None: ""}[row["holds"]]
        goal = f"  (goal {row['goal']})" if row["goal"] else ""
        print(f"{row['name']:52} {format_number(row['value']):>10} {row['unit']}{goal}{mark}")
    code, reason = verdict(rows, locust_code, limited, strict=is_set("STRICT"))
    if reason:
        sys.stderr.write(f"load: {reason}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
