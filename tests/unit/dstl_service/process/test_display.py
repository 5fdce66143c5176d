"""Stored texts do not control the terminal that shows them."""

from __future__ import annotations

import pytest

from dstl_service.process.display import printable, utc_text
from storage.validation import NUMBER_MAX


@pytest.mark.parametrize("text", ["\x1b[2J", "a\nb", "\x9b2J", "\x7f", "\u202eabc", "\ud800", "\r"])
def test_control_characters_are_shown_as_escapes(text: str) -> None:
    """Escape sequences, line breaks, changes of direction and surrogates are shown, not executed."""
    shown = printable(text)

    assert shown.isprintable()
    assert f"\\u{next(ord(char) for char in text if not char.isprintable()):04x}" in shown


def test_plain_text_is_unchanged() -> None:
    """Text of any language is shown unchanged."""
    assert printable("größer, 大 \\n") == "größer, 大 \\n"


@pytest.mark.parametrize(
    ("ms", "text"), [(0, "1970-01-01T00:00:00.000+00:00"), (NUMBER_MAX, f"{NUMBER_MAX} ms"), (10**40, f"{10**40} ms")]
)
def test_any_stored_time_has_a_text(ms: int, text: str) -> None:
    """A time outside the calendar is shown as its number."""
    assert utc_text(ms) == text
