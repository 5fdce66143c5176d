"""
Reads JSON that another program may have written: objects of a store, answers of peers. Pure.

A user who can write the store can write any document, also with a valid checksum. It must lead to no error other than
those that callers turn into `CorruptDataError`.
"""

from __future__ import annotations

import json
from typing import Any

from storage.checksum import BytesLike
from storage.validation import NUMBER_MAX


def parse_json(data: BytesLike | str) -> Any:
    """
    Return the value that a JSON text holds.

    Raises:
        ValueError: It is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(data if isinstance(data, str) else bytes(data))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def whole_number(value: Any) -> int:
    """Return a whole number of 0 to `NUMBER_MAX`; raise `TypeError` for anything else."""
    if type(value) is not int or not 0 <= value <= NUMBER_MAX:
        raise TypeError(f"{str(value)[:80]!r} is not a whole number of 0 to {NUMBER_MAX}")
    return value


def text_of(value: Any) -> str:
    """Return a text; raise `TypeError` for anything else."""
    if type(value) is not str:
        raise TypeError(f"{str(value)[:80]!r} is not a text")
    return value
