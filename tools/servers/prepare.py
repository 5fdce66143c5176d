"""
``python -m tools.servers.prepare``: builds and fetches the servers that tests and benchmarks start.

Existing ones are kept. Each is also built at first use; with this done before, no test has to wait for a compiler. An
archive of Spark's classes is made as well, with which the JVMs of tests start faster, and byte code for what Python
workers import from an archive.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from storage.errors import DstlError
from tools.servers.faults.proxy import mitmproxy_program
from tools.servers.faults.toxiproxy import toxiproxy_program
from tools.servers.kafka import broker_jars, connector_jars
from tools.servers.postgres import postgres_program
from tools.servers.programs import ServerError
from tools.servers.s3_server import s3_program
from tools.servers.spark.classes import class_archive
from tools.servers.spark.worker_modules import compile_worker_modules
from tools.servers.spark.yarn import yarn_jars

SERVERS: dict[str, Callable[[], object]] = {
    "archive of Spark's classes": class_archive,  # the longest
    "byte code of PySpark's modules": compile_worker_modules,
    "S3 server (VersityGW)": s3_program,
    "Toxiproxy": toxiproxy_program,
    "Kafka": broker_jars,
    "Spark's Kafka connector": connector_jars,
    "YARN": yarn_jars,
    "mitmproxy": mitmproxy_program,
    "PostgreSQL": postgres_program,
}


def main() -> int:
    """Build or fetch all of them, two at a time; return the exit code."""
    with ThreadPoolExecutor(2) as pool:
        tasks = {name: pool.submit(_timed, get) for name, get in SERVERS.items()}
    code = 0
    for name, task in tasks.items():
        try:
            seconds = task.result()
        except ServerError as error:
            sys.stderr.write(f"{name}: {error}\n")
            code = 1
        except DstlError as error:
            sys.stderr.write(f"{name}: {error}; tests do without it, and take longer\n")
        else:
            if seconds >= 1:  # else it existed
                sys.stdout.write(f"{name}: ready after {seconds:.0f} s\n")
    return code


def _timed(get: Callable[[], object]) -> float:
    started = time.monotonic()
    get()
    return time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())
