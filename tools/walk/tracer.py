"""
Records a change's path in one process: at each station, the project's files on the stack.

A *station* is a function that hands data over: to the batch's overlay, into a sealed change set, to a socket, to the
tracker of change sets, to the object store, to a table. The files on the stack are those that a reader passes on the
way there. A task of the event loop and a thread begin their own stack, and end at their own station.

`sitecustomize`, which every Python process of the run imports, calls `install`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("backend_client", "dstl_service", "storage")
FILE_VARIABLE = "DSTL_WALK_FILE"

STATIONS: dict[tuple[str, str], tuple[str, str]] = {
    ("backend_client/state/keyed_state.py", "update"): ("overlay", ""),
    ("storage/change_set.py", "encode_columns"): ("sealed", ""),
    ("backend_client/service/client.py", "_send"): ("request", "path"),
    ("dstl_service/intake/change_sets.py", "receive"): ("received", ""),
    ("dstl_service/intake/change_sets.py", "request"): ("requested", ""),
    ("storage/local_store.py", "put"): ("stored", "key"),
    ("storage/local_store.py", "get_range"): ("read", "key"),
    ("backend_client/table/journal.py", "append"): ("table", ""),
}
"""Name of each station, and the argument that names the data handed over, by file and function."""


def install() -> None:
    """Trace this process and the threads it starts from now on, if a walk is being recorded."""
    target = os.environ.get(FILE_VARIABLE)
    if not target:
        return
    file_of = _project_files()

    # Unlike a profiler, which hears of each return too, a tracer that wants no lines hears of calls alone.
    def trace(frame: FrameType, _event: str, _arg: Any) -> None:
        if file := file_of(frame):
            station = STATIONS.get((file, frame.f_code.co_name))
            if station is not None:
                _record(target, *station, frame, file_of)

    threading.settrace(trace)
    sys.settrace(trace)


def _project_files() -> Callable[[FrameType], str]:
    """Return a function that returns a frame's file relative to the project; empty for other files."""
    known: dict[str, str] = {}

    def file_of(frame: FrameType) -> str:
        name = frame.f_code.co_filename
        if name not in known:
            path = Path(name)
            relative = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
            known[name] = relative if relative.split("/")[0] in PARTS else ""
        return known[name]

    return file_of


def _record(target: str, station: str, argument: str, frame: FrameType, file_of: Callable[[FrameType], str]) -> None:
    stack: list[str] = []
    outer: FrameType | None = frame
    while outer is not None:
        file = file_of(outer)
        if file and (not stack or stack[-1] != file):
            stack.append(file)
        outer = outer.f_back
    entry = {"station": station, "what": str(frame.f_locals.get(argument, "")), "stack": stack[::-1]}
    handle = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, json.dumps(entry).encode() + b"\n")  # one write, for processes append to one file
    finally:
        os.close(handle)
