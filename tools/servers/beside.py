"""
``python -m tools.servers.beside COMMAND…``: runs a command beside a Kafka broker and a PostgreSQL server of its own.

The command finds them by KAFKA_SERVERS and libpq's variables (PGHOST, PGPORT, PGUSER, PGDATABASE), and Spark its Kafka
connector by PYSPARK_SUBMIT_ARGS. Both servers are stopped, and their data removed, when it ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from tools.servers.kafka import KafkaBroker, connector_jars
from tools.servers.postgres import PostgresServer
from tools.servers.programs import ServerError


def main(command: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    if not command:
        sys.stderr.write("usage: python -m tools.servers.beside COMMAND…\n")
        return 2
    with ExitStack() as stack:
        try:
            broker, database = stack.enter_context(KafkaBroker()), stack.enter_context(PostgresServer())
            jars = ",".join(map(str, connector_jars()))
        except ServerError as error:
            sys.stderr.write(f"{error}\n")
            return 2
        environment = {
            "KAFKA_SERVERS": broker.servers,
            "PGHOST": database.address,
            "PGPORT": str(database.port),
            "PGUSER": database.user,
            "PGDATABASE": database.database,
            "PYSPARK_SUBMIT_ARGS": f"--jars {jars} pyspark-shell",
        }
        process = subprocess.Popen(command, env={**os.environ, **environment})
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            return process.wait()
        except KeyboardInterrupt:  # the terminal has told the command, too
            return process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
