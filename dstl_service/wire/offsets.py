"""The offsets of a query's sources, read from a checkpoint's offsets entry, which is Spark's. No I/O."""

from __future__ import annotations

import json
from typing import Any

_VERSION = "v1"
_NONE = "-"


def source_offsets(entry: str) -> list[Any] | None:
    """
    Return up to where each source of a query was read, as the source itself writes it, in the query's order.

    A Kafka source has ``{topic: {partition: next offset}}``; a source that has not been read yet has None.

    Args:
        entry: Spark's offsets entry: its version, a line of its own, and a line per source.

    Returns:
        The offsets; None for an entry in an unknown form.
    """
    version, *lines = entry.splitlines()[:1000] or [""]
    if version != _VERSION or not lines:
        return None
    try:
        return [None if line.strip() == _NONE else json.loads(line) for line in lines[1:] if line.strip()]
    except (ValueError, RecursionError):
        return None
