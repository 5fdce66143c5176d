"""Parsing of token files. No I/O."""

from __future__ import annotations

import re

from storage.errors import InvalidInputError

TOKEN_CHARS_MAX = 4096
_TOKEN = re.compile(r"[!-~]+")


def parse_tokens(text: str) -> list[str]:
    """
    Return the tokens of a token file, one per line: the first is sent, all are accepted.

    Raises:
        InvalidInputError: There is none, or one is not valid in a header; the message contains no token.
    """
    tokens = [line.strip() for line in text.splitlines() if line.strip()]
    if not tokens:
        raise InvalidInputError("there is no token; add one")
    if any(len(token) > TOKEN_CHARS_MAX or not _TOKEN.fullmatch(token) for token in tokens):
        raise InvalidInputError("a token must be one line of at most 4096 visible ASCII characters")
    return tokens
