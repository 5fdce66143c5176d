"""
``make stack`` and ``make stack-check``: the topology of compose/ as plain processes on loopback.

Without arguments it prints addresses and an example command and runs until Ctrl-C; with ``--check`` it runs the example
job and ends with its exit code.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from storage.errors import DstlError
from tools.servers.programs import ServerError
from tools.servers.topology import Topology


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stack; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.servers", description="Run the whole stack on loopback.")
    parser.add_argument("--check", action="store_true", help="run the example job on it, then stop")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _stop)
    try:
        with tempfile.TemporaryDirectory(prefix="dstl-stack-", ignore_cleanup_errors=True) as folder:
            return _run(Path(folder), check=options.check)
    except (DstlError, ServerError) as error:
        sys.stderr.write(f"stack: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _run(folder: Path, *, check: bool) -> int:
    with Topology(folder) as topology:
        print(topology.describe(), flush=True)
        if check:
            environment = {**os.environ, **topology.driver_environment()}
            return subprocess.run(topology.example_command(), env=environment, check=False).returncode
        print("Ctrl-C stops it.", flush=True)
        with suppress(KeyboardInterrupt):
            signal.pause()
    return 0


def _stop(_number: int, _frame: FrameType | None) -> None:
    """Handle SIGTERM like Ctrl-C: stop all processes that were started."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
