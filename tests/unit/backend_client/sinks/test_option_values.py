"""Errors of libraries without the values of options."""

from __future__ import annotations

import pytest

from backend_client.sinks.option_values import check_text, without_values
from storage.errors import InvalidInputError


def told(text: str, **options: object) -> str:
    return without_values(text, options, is_told={"host", "user"}.__contains__)


@pytest.mark.parametrize(
    ("value", "quoted"),
    [
        ("s3cret", 'invalid value: "s3cret"'),
        ("s3cret", "Unsupported mechanism: s3cret"),
        ("s3c'r\"et", "bad value: 's3c\\'r\"et'"),
        ('s3c"ret', 'Error("failed to parse \\"s3c\\\\\\"ret\\"")'),
        ("s3c\\ret\né", "bad value: 's3c\\\\ret\\né'"),
        ("s3cret é", 'failed: "s3cret \\u00e9"'),
        ("s3cret" * 100, f'Invalid value "{"s3cret" * 50}'),
        (["s3cret"], "Invalid value \"['s3cret']\""),
    ],
)
def test_value_is_left_out(value: object, quoted: str) -> None:
    """However a library writes it, also if it cuts it off."""
    found = told(quoted, wrong=value)
    assert "s3c" not in found
    assert "…" in found


def test_names_places_and_numbers_are_told() -> None:
    """They say what is wrong, and a number is hardly a secret; a value that is also a name is none."""
    text = 'server at "db", port 5432: role "postgres" does not exist, 10 s, on'
    assert told(text, host="db", user="postgres", password="postgres", port="5432", timeout=10, mode="on") == text


def test_words_of_the_libraries_are_told() -> None:
    """They say what to do."""
    text = "expected true or false; no provider for GSSAPI"
    assert told(text, verify="false", keepalive="true", mechanism="GSSAPI") == text


def test_part_of_a_word_stays() -> None:
    """A value is found as a whole only."""
    assert told("passwords: pass", sslmode="pass") == "passwords: …"


def test_options_in_the_place_of_a_text_are_not_told() -> None:
    """Given as the second argument, for example."""
    with pytest.raises(InvalidInputError, match="topic must be a text, it is a dict") as refused:
        check_text("topic", {"sasl.password": "s3cret"})
    assert "s3cret" not in str(refused.value)
