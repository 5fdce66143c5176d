"""Figures of the download cache, shown as metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DownloadFigures:
    """
    The figures of one download cache, which alone updates them.

    Args:
        hits: Reads served by a finished or running download.
        misses: Objects downloaded from the store.
        failures: Downloads that failed on the local disk.
        bytes_kept: Bytes of downloads on disk.
    """

    hits: int = 0
    misses: int = 0
    failures: int = 0
    bytes_kept: int = 0
