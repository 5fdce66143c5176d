"""The command ``dstl``: ``serve`` runs the service; the other commands work on the storage."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from dstl_service.commands.arguments import parser
from dstl_service.commands.common import UnwrittenOutputError, complain, end_output
from storage.errors import DstlError
from storage.validation import validate_name

_INTERRUPTED, _UNREAD = 130, 141
"""Exit codes as a shell has them for SIGINT and SIGPIPE."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = parser().parse_args(arguments)
    try:
        if "job" in options:  # a longer path, such as that of a job's life, would show a job where there is none
            validate_name("job", options.job)
        result: int = options.run(options)
        end_output()
    except DstlError as error:
        complain(str(error))
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
    except UnwrittenOutputError as error:
        return _unwritten(error.reason)
    return result


def _unwritten(error: OSError) -> int:
    """Return the exit code where the output cannot be written, and keep Python from trying again at its end."""
    if not isinstance(error, BrokenPipeError):  # whose reader, such as `head`, has enough
        complain(f"the output cannot be written: {error.strerror or error}")
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _UNREAD if isinstance(error, BrokenPipeError) else 2
