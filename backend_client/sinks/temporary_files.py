"""Files that a sink makes on this host before it publishes them, and the error if there is no room."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from storage.errors import UnavailableError


@contextmanager
def room_for_records() -> Iterator[None]:
    """Raise `UnavailableError`, with the remedy, if the folder of temporary files cannot be written."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            f"records cannot be kept in the folder {tempfile.gettempdir()} of this host: {error.strerror or error}; "
            "make room there, or name another folder with TMPDIR"
        ) from error
