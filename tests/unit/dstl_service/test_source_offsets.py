"""The sources' offsets, read from an offsets entry."""

from __future__ import annotations

import pytest

from dstl_service.wire import source_offsets

ENTRY = 'v1\n{"batchWatermarkMs":0}\n{"in":{"0":7,"1":3}}\n-\n{"logOffset":2}'


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (ENTRY, [{"in": {"0": 7, "1": 3}}, None, {"logOffset": 2}]),
        ("v1\n{}", []),
        ("", None),
        ("v9\n{}\n{}", None),
        ("v1\n{}\n{", None),
        ("v1\n{}\n" + "[" * 100_000, None),
    ],
)
def test_offsets_of_sources(entry: str, expected: object) -> None:
    """An unknown form is not guessed at."""
    assert source_offsets(entry) == expected
