"""Which tokens are accepted, and how tokens are replaced."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from dstl_service.access.tokens import Access
from storage.errors import InvalidInputError
from storage.testing import FakeClock


def write(path: Path, text: str, age_s: int) -> None:
    """Write a token file whose modification time differs from every other's."""
    path.write_text(text, encoding="utf-8")
    os.utime(path, (age_s, age_s))


def lets_in(access: Access, authorization: bytes | None) -> bool:
    """Tell whether a request with this header is accepted."""
    return access.identify(authorization) is not None


def test_without_token_all_are_let_in() -> None:
    """A service without a token requires none, and sends none."""
    tokens = Access(None, None, FakeClock())

    assert lets_in(tokens, None)
    assert lets_in(tokens, b"Bearer any")
    assert tokens.own() is None


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"Bearer secret", True),
        (None, False),
        (b"", False),
        (b"secret", False),
        (b"bearer secret", False),
        (b"Bearer secret ", False),
        (b"Bearer secre", False),
        (b"Bearer secrets", False),
        ("Bearer sécret".encode("latin-1"), False),
    ],
)
def test_token_must_be_exact(header: bytes | None, expected: bool) -> None:
    """Only the complete token, in its one form, is accepted."""
    assert lets_in(Access("secret", None, FakeClock()), header) is expected


def test_token_file_is_read_again(tmp_path: Path) -> None:
    """Every line is accepted, the first is sent to others, and a change takes effect at the next check."""
    path, clock = tmp_path / "token", FakeClock()
    write(path, "old\n", 1)
    tokens = Access(None, path, clock)
    write(path, "\nnew \nold\n", 2)
    assert not lets_in(tokens, b"Bearer new")

    clock.advance(1_000)
    assert (lets_in(tokens, b"Bearer new"), lets_in(tokens, b"Bearer old"), tokens.own()) == (True, True, "new")

    write(path, "new\n", 3)
    clock.advance(1_000)
    assert (lets_in(tokens, b"Bearer new"), lets_in(tokens, b"Bearer old"), tokens.own()) == (True, False, "new")


def test_half_written_file_changes_nothing(tmp_path: Path) -> None:
    """A file that is being written counts once it has not changed for a second, or is older than that."""
    path, clock = tmp_path / "access.toml", FakeClock()
    entry = '[[tokens]]\ntoken = "secret"\nname = "orders"\nrole = "full"\n'
    jobs = 'jobs = ["orders"]\n'
    write(path, entry + jobs, 1)
    access = Access(None, None, clock, path)
    rights = access.identify(b"Bearer secret")
    assert rights is not None
    assert not rights.is_unlimited
    now_s = clock.now_ms() // 1000
    for number, half in enumerate(["", entry, entry + "# and more\n"], 1):
        clock.advance(1_000)
        write(path, half, now_s + number)
        assert access.identify(b"Bearer secret") == rights

    clock.advance(1_000)
    whole = access.identify(b"Bearer secret")
    assert whole is not None
    assert whole.is_unlimited

    write(path, entry + jobs, now_s + 3600)  # by a file server whose clock is ahead
    for expected in (whole, rights):
        clock.advance(1_000)
        assert access.identify(b"Bearer secret") == expected


@pytest.mark.parametrize("text", [None, "", "two words\n"])
def test_broken_token_file_changes_nothing(text: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A missing or malformed file admits nobody and locks nobody out; the log says so, without the token."""
    path, clock = tmp_path / "token", FakeClock()
    write(path, "old", 1)
    tokens = Access(None, path, clock)
    if text is None:
        path.unlink()
    else:
        write(path, text, 2)
    clock.advance(1_000)

    with caplog.at_level(logging.WARNING):
        assert (lets_in(tokens, b"Bearer old"), lets_in(tokens, None)) == (True, False)
    assert "token file cannot be read again" in caplog.text
    assert "words" not in str(vars(caplog.records[0]))


@pytest.mark.parametrize("content", [None, "", " \n", "a b", "ümlaut", "x" * 5000])
def test_impossible_token_file_stops_start(content: str | None, tmp_path: Path) -> None:
    """A token file that is missing, empty or cannot be sent stops the start; it never means "no token"."""
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content, encoding="utf-8")

    with pytest.raises(InvalidInputError, match="token file"):
        Access(None, path, FakeClock())
