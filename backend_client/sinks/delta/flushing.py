"""Flushes commits of a table on a disk, which the library does not do: the log gives published output up."""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from deltalake import DeltaTable

from backend_client.sinks.delta.markers import is_of_slot
from backend_client.sinks.protocol import Slot
from storage.errors import UnavailableError
from storage.local_files import flush_folder
from storage.stored_json import parse_json

_FLUSHED_AFTER_S = 6 * 3600.0
"""Older files are on the disk: systems write them after half a minute, and clocks may be hours apart."""
_CHECKED_COMMITS = 10
"""So many commits before a check are flushed with its own: those of checks that were killed before they did it."""


def flush(folder: Path, version: int) -> None:
    """Flush a commit and its files, and the log's checkpoint if there is one of its version: readers begin with it."""
    commit = _commit_file(folder, version)
    checkpoint = commit.with_suffix(".checkpoint.parquet")
    of_log = [checkpoint, commit.with_name("_last_checkpoint")] if checkpoint.exists() else []
    files = [file for file, _ in _added(folder, _actions(commit))]
    # A partition by two columns is a folder in a folder, and the name of each is in the one around it.
    folders = {around for file in files for around in file.parents if folder in around.parents}
    # Others remove files, and those of another user are maybe not to be opened; publishers may open their own.
    for path in [*files, *of_log]:
        with suppress(FileNotFoundError, PermissionError):
            _flush_file(path)
    for path in folders:
        with suppress(FileNotFoundError, PermissionError):
            flush_folder(os.fspath(path))
    flush_folder(os.fspath(folder))
    _flush_file(commit)
    flush_folder(os.fspath(commit.parent))


def _flush_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_parents(folder: Path) -> None:
    """Flush the names of a table's folder and of those around it, as far as this process may open them."""
    for around in folder.parents:
        with suppress(PermissionError):
            flush_folder(os.fspath(around))


def flush_checked(folder: Path, opened: int, newest: int) -> None:
    """
    Flush what a check has committed, or one before it: commits on which those of output are built.

    Without them no reader could open the table, whose output the log has given up.

    Args:
        folder: The table's folder.
        opened: The table's version when the check opened it.
        newest: Its version afterwards.
    """
    oldest_s = time.time() - _FLUSHED_AFTER_S
    for number in (0, *range(max(1, opened - _CHECKED_COMMITS), newest + 1)):
        with suppress(FileNotFoundError):  # the log was cleaned
            if _commit_file(folder, number).stat().st_mtime > oldest_s:
                flush(folder, number)


def flush_newest(table: DeltaTable, folder: Path, slot: Slot) -> None:
    """
    Flush a slot's newest commit, whose publisher may have been killed before it did: it counts as published.

    Raises:
        UnavailableError: The host went down instead, and the commit's files were not on the disk.
    """
    oldest_s = time.time() - _FLUSHED_AFTER_S
    with suppress(FileNotFoundError):  # of an old commit, of which the log was cleaned
        for number in range(table.version(), -1, -1):
            commit = _commit_file(folder, number)
            actions = _actions(commit)
            if is_of_slot(actions, slot):
                _check_whole(table, folder, commit, actions)
                flush(folder, number)
            elif commit.stat().st_mtime > oldest_s:
                continue
            return


def _check_whole(table: DeltaTable, folder: Path, commit: Path, actions: list[dict[str, Any]]) -> None:
    sizes = {file: file.stat().st_size if file.exists() else 0 for file, _ in _added(folder, actions)}
    if not (cut := [(file, size) for file, size in _added(folder, actions) if sizes[file] != size]):
        return
    used = {Path(unquote(path)).name for path in table.file_uris()}  # each has a name of its own; others remove files
    for file, size in cut:
        if file.name in used:
            raise UnavailableError(
                f"file {file} of the table has {sizes[file]} of {size} bytes: the host went down before it was on the "
                f"disk, and readers fail. If {commit.name} is the newest commit in {commit.parent}, remove it there, "
                f"with {commit.stem}.checkpoint* and _last_checkpoint if there are such, and the output is published "
                "again; if not, rewind the job to a checkpoint before"
            )


def _commit_file(folder: Path, version: int) -> Path:
    return folder / "_delta_log" / f"{version:020d}.json"


def _actions(commit: Path) -> list[dict[str, Any]]:
    """Return the actions of a commit; without what the library takes from other writers, and never writes itself."""
    found = []
    # Bytes are split at line ends only; text would also be split within values, since U+2028 stands for itself in JSON.
    for line in commit.read_bytes().splitlines():
        with suppress(ValueError):  # it is empty, nested too deeply, or has a number of thousands of digits
            found.append(parse_json(line))
    return [action for action in found if isinstance(action, dict)]


def _added(folder: Path, actions: list[dict[str, Any]]) -> list[tuple[Path, int]]:
    """
    Return the files in the folder that a commit has added, with their sizes in bytes.

    Whoever may write to the table may write a commit with the sink's marker, and any paths.
    """
    added = [action["add"] for action in actions if isinstance(action.get("add"), dict)]
    found = [(each.get("path"), each.get("size")) for each in added]
    files = [(folder / unquote(path), size) for path, size in found if isinstance(path, str) and isinstance(size, int)]
    return [(file, size) for file, size in files if _is_file_within(folder, file)]


def _is_file_within(folder: Path, file: Path) -> bool:
    """Return whether a path is that of a file in a folder, if only of one that is gone: opening a pipe may not end."""
    if folder not in file.parents or ".." in file.parts:
        return False
    try:
        return stat.S_ISREG(file.stat().st_mode)
    except FileNotFoundError:
        return not os.path.lexists(file)
    except (OSError, ValueError):  # no file can have it: too long, with NUL, within a file
        return False
