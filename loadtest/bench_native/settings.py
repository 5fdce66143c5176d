"""Reads ``spark.conf``: Spark's settings, each with the reason for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PATH = Path(__file__).with_name("spark.conf")


@dataclass(frozen=True, slots=True)
class SparkSetting:
    """One setting, and why it has this value."""

    name: str
    value: str
    reason: str


def spark_settings(text: str) -> Iterator[SparkSetting]:
    """
    Yield the settings of a file in the format of ``spark-defaults.conf``.

    The comment lines directly above a setting are its reason.

    Raises:
        ValueError: A setting has no reason, or no value.
    """
    comment: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            comment.append(line.lstrip("# "))
        elif line.strip():
            name, _, value = line.partition(" ")
            if not comment or not value.strip():
                raise ValueError(f"{name} needs a value, and its reason in a comment above it")
            yield SparkSetting(name, value.strip(), " ".join(comment))
            comment = []
        else:
            comment = []
