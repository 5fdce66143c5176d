"""Files and folders of a local store: whole writes and reads, names, and flushes. Blocking I/O; raises `OSError`."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

_BUFFERS_PER_WRITE_MAX = 1024  # IOV_MAX of Linux.
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
WAY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
"""Opens a folder only to reach what is in it, as any path does."""


def write_file(name: str, within: int, buffers: Sequence[memoryview]) -> None:
    """Create a file in a folder, write the buffers, flush it to the device and close it; any error is raised."""
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=within)
    try:
        for first in range(0, len(buffers), _BUFFERS_PER_WRITE_MAX):
            _write_all(file, buffers[first : first + _BUFFERS_PER_WRITE_MAX])
        os.fsync(file)
    except BaseException:
        with suppress(OSError):
            os.close(file)
        raise
    os.close(file)


def _write_all(file: int, buffers: Sequence[memoryview]) -> None:
    pending = list(buffers)
    while pending:
        written = os.writev(file, pending)
        done = 0
        while done < len(pending) and written >= len(pending[done]):
            written -= len(pending[done])
            done += 1
        del pending[:done]
        if written:
            pending[0] = pending[0][written:]


def read_at(file: int, offset: int, size: int) -> bytes:
    """Read `size` bytes, or fewer at the end of the file."""
    chunks = []
    while size > 0:
        chunk = os.pread(file, size, offset)
        if not chunk:
            break
        chunks.append(chunk)
        offset += len(chunk)
        size -= len(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def link(source: str, source_folder: int, target: str, target_folder: int) -> bool:
    """Give a file a second name, in another folder; return whether the name was free."""
    try:
        os.link(source, target, src_dir_fd=source_folder, dst_dir_fd=target_folder, follow_symlinks=False)
    except FileExistsError:
        if stat.S_ISDIR(os.stat(target, dir_fd=target_folder, follow_symlinks=False).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target) from None
        return False
    return True


def open_to_read(name: str, within: int) -> int:
    """Open a file in a folder; `OSError` with `errno.ELOOP` for a link. A pipe does not block."""
    return os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)


@contextmanager
def folder_within(base: str, folder: str, flags: int = _FOLDER) -> Iterator[int]:
    """
    Open a folder below a base, and yield its descriptor; no link below the base is followed.

    Args:
        base: An absolute path, which may be or contain a link.
        folder: The folder's path relative to it.
        flags: How it is opened: `WAY` if only files in it are needed by name.

    Raises:
        OSError: It cannot be opened; with `errno.ELOOP`, a part of the path is a link.
    """
    names = [name for name in folder.split("/") if name]
    place, within = base, os.open(base, WAY if names else flags)
    try:
        for number, name in enumerate(names, 1):
            place = os.path.join(place, name)
            try:
                found = os.open(name, (flags if number == len(names) else WAY) | os.O_NOFOLLOW, dir_fd=within)
            except NotADirectoryError:
                if os.path.islink(place):
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), place) from None
                raise
            os.close(within)
            within = found
        yield within
    finally:
        os.close(within)


def flush_folder(folder: str) -> None:
    """Flush a folder's names to the device."""
    file = os.open(folder, _FOLDER)
    try:
        flush_opened(file)
    finally:
        os.close(file)


def flush_opened(folder: int) -> None:
    """Flush the names of a folder, by its descriptor, to the device."""
    try:
        os.fsync(folder)
    except OSError as error:
        # Some mounted file systems cannot flush folders; their names are durable at once or never.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
