"""
Limits of a run's figures, from a TOML file; a missed one fails the run.

Each line names a figure as `reports/load.json` has it, and its limit in the figure's unit::

    "checkpoint latency p99" = "<= 800"
    "failures" = "== 0"
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from storage.errors import InvalidInputError
from tools.reporting.figures import Figure, Goal, Relation

_LIMIT = re.compile(r"(<=|>=|==)\s*(\d+(?:\.\d+)?)")


def read_thresholds(path: Path, known: Sequence[str]) -> dict[str, Goal]:
    """
    Read a file of thresholds.

    Args:
        path: The file's.
        known: The names of all figures that the run will have.

    Raises:
        InvalidInputError: The file cannot be read, holds no threshold, an unknown name, or no limit.
    """
    try:
        return thresholds_of(path.read_text(encoding="utf-8"), known)
    except OSError as error:
        raise InvalidInputError(f"the thresholds cannot be read: {error}") from None
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from None


def thresholds_of(text: str, known: Sequence[str]) -> dict[str, Goal]:
    """Return the thresholds in the text of a file, see `read_thresholds`."""
    try:
        limits = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInputError(f"not TOML: {error}") from None
    if unknown := sorted(set(limits) - set(known)):
        listed = "\n".join(f"  {name}" for name in known)
        raise InvalidInputError(f"no figure of this run is named {', '.join(map(repr, unknown))}; it has\n{listed}")
    if not limits:
        raise InvalidInputError("no threshold")
    return {name: _goal(name, limit) for name, limit in limits.items()}


def with_thresholds(figures: Sequence[Figure], thresholds: Mapping[str, Goal]) -> list[Figure]:
    """Return the figures with the thresholds as their goals; those without one keep their own."""
    return [replace(figure, goal=thresholds.get(figure.name, figure.goal)) for figure in figures]


def _goal(name: str, limit: object) -> Goal:
    found = _LIMIT.fullmatch(limit.strip()) if isinstance(limit, str) else None
    if found is None:
        raise InvalidInputError(
            f'the limit of {name!r} must be a text such as "<= 800", ">= 5" or "== 0", got {limit!r}'
        )
    return Goal(cast("Relation", found[1]), float(found[2]))
