"""Errors that mean that a local disk has lost bytes, and errors that mean something else."""

from __future__ import annotations

import errno
import os

import pytest

from storage.lost_bytes import is_lost, is_lost_text


@pytest.mark.parametrize("code", [errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA])
@pytest.mark.parametrize(
    "text",
    [
        "IO error: While pread offset 4096 len 70: /t/000008.sst: {}",
        "IO error: While open a file for random read: /t/000008.sst: {}",
        "Corruption: IO error: While reading file sequentially: /t/MANIFEST-000005: {}",
        "IO error: while stat a file for size: /t/000008.sst: {}",
    ],
)
def test_error_of_a_read_is_a_loss(code: int, text: str) -> None:
    """The system's error and RocksDB's text for it are classified alike."""
    assert is_lost(OSError(code, "x"))
    assert is_lost_text(text.format(os.strerror(code)))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENOMEM, errno.ESTALE, errno.ENOENT])
def test_transient_error_is_not_a_loss(code: int) -> None:
    """Nothing is discarded because files, memory or space ran out."""
    assert not is_lost(OSError(code, "x"))
    assert not is_lost_text(f"IO error: While pread offset 4096 len 70: /t/000008.sst: {os.strerror(code)}")


@pytest.mark.parametrize(
    "text",
    [
        "IO error: While appending to file: /t/000009.sst: {}",
        "IO error: While fsync: /t/000009.sst: {}",
        "IO error: While open file for random read/write: /t/000009.sst: {}",
        "IO error: While pwrite to file at offset 0: /t/000009.sst: {}",
        "While pread offset 4096: {}",
    ],
)
def test_error_of_a_write_is_not_a_loss(text: str) -> None:
    """Existing data may be intact."""
    assert not is_lost_text(text.format(os.strerror(errno.EIO)))
