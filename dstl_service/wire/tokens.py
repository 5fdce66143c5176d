"""The tokens by which callers are known, as they lie in files. No I/O."""

from __future__ import annotations

import re

from storage.errors import InvalidInputError

TOKEN_CHARS_MAX = 4096
_TOKEN = re.compile(r"[!-~]+")


def parse_tokens(text: str) -> list[str]:
    """
    Return the tokens of a token file, one a line: the first is sent, every one is accepted.

    Raises:
        InvalidInputError: There is none, or one cannot stand in a header; no token is part of the message.
    """
    tokens = [line.strip() for line in text.splitlines() if line.strip()]
    if not tokens:
        raise InvalidInputError("there is no token; write one into it")
    if any(len(token) > TOKEN_CHARS_MAX or not _TOKEN.fullmatch(token) for token in tokens):
        raise InvalidInputError("a token has only visible ASCII characters, and one line")
    return tokens
