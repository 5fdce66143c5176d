"""
Whether Spark's plan of a batch is the one that a checkpoint was made of. No I/O.

A batch that Spark executes again has the offsets entry of its first execution. Where that entry was lost, Spark plans
the batch anew, under the same number and with whatever the sources have by then.
"""

from __future__ import annotations

import json
from typing import Any

_PLANNED = ("batchTimestampMs", "batchWatermarkMs")


def is_same_plan(offsets: str | None, stored: str) -> bool:
    """
    Say whether an offsets entry is the stored one.

    Sources' offsets alone do not tell: a file source counts files in the checkpoint folder itself, so another set of
    files has the same number. The moment at which the batch was planned does. How the JSON is written is no matter, and
    neither are the settings that stand in the entry.

    Args:
        offsets: What Spark has of the batch now; None for nothing.
        stored: What the checkpoint's manifest has.
    """
    return offsets == stored or (offsets is not None and _plan(offsets) == _plan(stored))


def _plan(entry: str) -> Any:
    """Return what identifies a plan; an entry of an unknown form identifies itself."""
    try:
        version, *lines = entry.splitlines()
        metadata, *sources = (json.loads(line) for line in lines if line.strip())
        return version, [metadata[name] for name in _PLANNED], sources
    except (LookupError, TypeError, ValueError):
        return entry
