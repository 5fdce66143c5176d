"""
Classifies table errors: local disk or corrupt data.

A failing disk can be avoided by another folder (I16). Damaged data is the same everywhere and must be reported (I10).
"""

from __future__ import annotations

from storage.errors import UnavailableError


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
