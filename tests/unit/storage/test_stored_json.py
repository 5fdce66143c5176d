"""Any unreadable JSON document in the store raises one kind of error."""

from __future__ import annotations

import pytest

from storage.stored_json import parse_json, text_of, whole_number
from storage.validation import NUMBER_MAX

DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize("data", [DEEP, b"", b"{", b"\xff", b"9" * 5000])
def test_unreadable_documents_are_value_errors(data: bytes) -> None:
    """Deeply nested or damaged documents and huge numbers raise `ValueError`, which callers expect."""
    with pytest.raises(ValueError, match=r"."):
        parse_json(data)


@pytest.mark.parametrize("value", [-1, NUMBER_MAX + 1, True, 1.0, "1", None, float("inf")])
def test_other_values_are_not_numbers(value: object) -> None:
    """A stored number is an integer within the project's bounds."""
    with pytest.raises(TypeError, match="whole number"):
        whole_number(value)


def test_values_of_the_right_type_are_returned() -> None:
    """Valid values are returned unchanged; a number is not text."""
    assert (parse_json(b'{"a":[1]}'), whole_number(NUMBER_MAX), text_of("x")) == ({"a": [1]}, NUMBER_MAX, "x")
    with pytest.raises(TypeError, match="not a text"):
        text_of(1)
