"""What a cache of downloads reports, and metrics show."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DownloadFigures:
    """
    The figures of one cache of downloads, which alone changes them.

    Args:
        hits: Reads that a download on disk or on its way served.
        misses: Objects downloaded from the store.
        failures: Downloads that the disk lost or refused.
        bytes_kept: Bytes of downloads on disk.
    """

    hits: int = 0
    misses: int = 0
    failures: int = 0
    bytes_kept: int = 0
