"""
Checks whether Spark's plan of a batch is the one that a checkpoint was made from. No I/O.

A batch that Spark executes again has the offsets entry of its first execution. If that entry was lost, Spark plans the
batch again, under the same number and with the rows that the sources have by then.
"""

from __future__ import annotations

import json
from typing import Any

_PLANNED = ("batchTimestampMs", "batchWatermarkMs")


def is_same_plan(offsets: str | None, stored: str) -> bool:
    """
    Return whether an offsets entry is the same plan as the stored one.

    The sources' offsets alone cannot tell: a file source numbers its files in the checkpoint folder itself, so another
    set of files can have the same number. The time at which the batch was planned can. The formatting of the JSON and
    the settings in the entry do not count.

    Args:
        offsets: Spark's entry for the batch now; None if there is none.
        stored: The entry in the checkpoint's manifest.
    """
    return offsets == stored or (offsets is not None and _plan(offsets) == _plan(stored))


def _plan(entry: str) -> Any:
    """Return what identifies a plan; an entry in an unknown form stands for itself."""
    try:
        version, *lines = entry.splitlines()
        metadata, *sources = (json.loads(line) for line in lines if line.strip())
        return version, [metadata[name] for name in _PLANNED], sources
    except (LookupError, TypeError, ValueError):
        return entry
