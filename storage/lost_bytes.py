"""
Tells whether a local disk has lost bytes of a file: the one rule for all readers of tables' files. No I/O.

A disk that has lost bytes reports an error when they, or what leads to them, are read. A retry never succeeds, so a
cache has to be rebuilt. Other errors are transient, or of another cause: too many open files, too little memory,
a full disk or quota. An error of a write does not count either: earlier bytes may be whole.
"""

from __future__ import annotations

import errno
import os
import re

_LOST = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA})
_LOST_TEXT = re.compile(
    # RocksDB's wording for its reads; it appends the system's text.
    r"[Ww]hile (?:pread|reading|open(?:ing)? (?:a )?file for (?:random read:|sequential)|mmap read|mmap file for read"
    rf"|prefetching|fseek|stat a file).*(?:{'|'.join(re.escape(os.strerror(code)) for code in sorted(_LOST))})",
    re.DOTALL,
)


def is_lost(error: OSError) -> bool:
    """Return whether an error, of reading a file or looking for it, means that its bytes on disk are lost."""
    return error.errno in _LOST


def is_lost_text(text: str) -> bool:
    """Return whether the text of an error of RocksDB, an "IO error", means the same."""
    return "IO error" in text and _LOST_TEXT.search(text) is not None
