"""
Shows stored texts and times to a person at a terminal. Pure.

Names, users and messages may come from the store: a writer of the store must not control an administrator's terminal,
nor forge lines of a report.
"""

from __future__ import annotations

from datetime import UTC, datetime


def printable(text: str) -> str:
    """Return a line in which control, formatting and surrogate characters, and line breaks, are escapes, as in JSON."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)


def utc_text(ms: int, timespec: str = "milliseconds") -> str:
    """Return a time as ISO text, or as its number of milliseconds if it is in no year up to 9999."""
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec=timespec)
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"
