"""
Classifies table errors: local disk, lost bytes or corrupt data.

A failing disk can be avoided by another folder (I16). Damaged data is the same everywhere and must be reported (I10).
"""

from __future__ import annotations

from storage.errors import UnavailableError
from storage.lost_bytes import is_lost_text


class LocalDiskError(UnavailableError):
    """The local folder of a table cannot be used; another one may be (I16)."""


def is_damage(error: BaseException | None) -> bool:
    """
    Return whether a RocksDB error is about the files' content; only its text tells.

    rocksdict raises plain `Exception`. A user's code may raise that, too, but with another text.
    """
    if type(error) is not Exception:
        return False
    text = str(error)
    if "IO error" in text:  # also inside a "Corruption" text, if descriptors ran out
        return "No such file or directory" in text
    return text.startswith(("Corruption", "Invalid argument", "Not implemented"))


def is_useless(error: BaseException | None) -> bool:
    """Return whether a RocksDB error means that a table's files never serve again: damage, or bytes that are lost."""
    return is_damage(error) or (type(error) is Exception and is_lost_text(str(error)))
