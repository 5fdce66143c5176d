"""
``python -m tools.walk``: prints the files through which a change passes, from `ValueState.update` to the manifest.

A real job runs with its sidecar and every process traced, see `tools.walk.tracer`. The path has three legs, and a
fourth on which the change returns:

append
    From the processor's update to the sidecar's tracker of change sets.
flush
    From the driver's request to the segment object.
complete
    From the driver's request to the manifest.
restore
    From the next batch's task to its table.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tools.walk.tracer import FILE_VARIABLE, ROOT

LEGS = ("append", "flush", "complete", "restore")
TIMEOUT_S = 180.0
_SITE = "from tools.walk.tracer import install\n\ninstall()\n"
_START = "dstl_service/commands/serve.py"  # the frames outside it start the process
_THREADS = "dstl_service/process/"  # threads only pass on the call


@dataclass(frozen=True, slots=True)
class Stop:
    """
    A station that a change reached.

    Args:
        leg: One of `LEGS`.
        station: Its name, see `tools.walk.tracer.STATIONS`.
        files: The files on the path to it, the outermost first.
    """

    leg: str
    station: str
    files: tuple[str, ...]


def record() -> list[Stop]:
    """
    Run the job and return the stops of its changes, each once, leg by leg in order of time.

    Raises:
        RuntimeError: The job failed; the message has the end of its output.
    """
    folder = Path(tempfile.mkdtemp(prefix="walk-"))
    try:
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
        trace = folder / "trace.jsonl"
        environment = {
            **os.environ,
            FILE_VARIABLE: str(trace),
            "PYTHONPATH": os.pathsep.join((str(folder / "site"), str(ROOT))),
            "DSTL_MATERIALIZATION_ENABLED": "false",
        }
        command = [sys.executable, "-m", "tools.walk.job", str(folder)]
        ran = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if ran.returncode:
            raise RuntimeError(f"the job ended with exit code {ran.returncode}:\n{ran.stderr[-2000:]}")
        return stops(map(json.loads, trace.read_text(encoding="utf-8").splitlines()))
    finally:
        for file in folder.glob("local/service-*.pid"):  # the job has just written it
            with suppress(ProcessLookupError):
                os.kill(int(file.read_text(encoding="utf-8")), signal.SIGTERM)
        shutil.rmtree(folder, ignore_errors=True)


def stops(entries: Iterable[dict[str, object]]) -> list[Stop]:
    """Return the stops of traced entries, each once, leg by leg."""
    found: dict[Stop, None] = {}
    for entry in entries:
        stack, station, what = entry["stack"], str(entry["station"]), str(entry["what"])
        assert isinstance(stack, list)
        files = tuple(file for file in stack if not file.startswith(_THREADS))
        leg = _leg(station, what, files)
        if _START in files:
            files = files[files.index(_START) + 1 :]
        if leg is not None:
            found[Stop(leg, station, files)] = None
    return sorted(found, key=lambda stop: LEGS.index(stop.leg))


def _leg(station: str, what: str, files: Sequence[str]) -> str | None:
    """Return the leg of a station; None if it is not on a change's path."""
    match station:
        case "request":
            route = what.split("?", maxsplit=1)[0].rsplit("/", 1)[-1]
            return "append" if route == "change-sets" else route if route in LEGS else None
        case "sealed":
            return "append" if "backend_client/service/log_writer.py" in files else None
        case "stored":
            if "/segments/" in what:
                return "flush"
            return "complete" if "dstl_service/checkpoints/checkpointer.py" in files else None
    return {"overlay": "append", "received": "append", "requested": "flush", "read": "restore", "table": "restore"}[
        station
    ]


def files_of(found: Iterable[Stop], legs: Iterable[str]) -> list[str]:
    """Return the files of some legs, each once, in the order of the path."""
    wanted = set(legs)
    return list(dict.fromkeys(file for stop in found if stop.leg in wanted for file in stop.files))


def entered_again(found: Iterable[Stop]) -> list[tuple[str, Stop]]:
    """Return each file that the path to a stop leaves and enters again."""
    return [(file, stop) for stop in found for file in sorted(set(stop.files)) if stop.files.count(file) > 1]


def main() -> int:
    """Print the path; return the exit code."""
    found = record()
    for leg in LEGS:
        sys.stdout.write(f"{leg}\n")
        for stop in found:
            if stop.leg == leg:
                sys.stdout.write(f"  {stop.station:<10} {' > '.join(stop.files)}\n")
    sys.stdout.write(f"{len(files_of(found, LEGS[:3]))} files from the update to the manifest\n")
    sys.stdout.write(f"{len(files_of(found, LEGS))} files with the restore\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
