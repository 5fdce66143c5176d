"""How a Spark batch is recognised as the one that a checkpoint was made of."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backend_client.spark.start.planned_batch import is_same_plan


def entry(
    source: Any = None, *, timestamp_ms: int = 5, conf: str = "a", separators: tuple[str, str] = (",", ":")
) -> str:
    metadata = {"batchWatermarkMs": 3, "batchTimestampMs": timestamp_ms, "conf": {"setting": conf}}
    parts = [json.dumps(part, separators=separators) for part in (metadata, source or {"logOffset": 1})]
    return "\n".join(["v1", *parts])


@pytest.mark.parametrize(
    ("offsets", "same"),
    [
        (entry(), True),
        (entry(separators=(", ", ": ")), True),
        (entry(conf="another version"), True),
        (entry(timestamp_ms=6), False),
        (entry({"logOffset": 2}), False),
        (entry() + "\n{}", False),
        (entry().replace("v1", "v2"), False),
        ("v1\nno JSON", False),
        ("", False),
        (None, False),
    ],
)
def test_same_plan(offsets: str | None, same: bool) -> None:
    """Batches are compared by the time of planning and the sources' offsets, not by how these are written."""
    assert is_same_plan(offsets, entry()) is same


def test_entries_of_an_unknown_form() -> None:
    """Entries of an unknown form are compared as text."""
    assert is_same_plan("another form", "another form")
    assert not is_same_plan("another form", "one more")
