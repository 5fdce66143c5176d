"""
Whose fault it is when a table's files cannot be used: the local disk's, or that of what was stored.

The disk can be left for another place (I16). Damage cannot: it is the same everywhere and has to be reported (I10).
"""

from __future__ import annotations

from storage.errors import UnavailableError


class LocalDiskError(UnavailableError):
    """The local folder of a table cannot be used; another one may be (I16)."""


def is_damage(error: BaseException | None) -> bool:
    """
    Return whether an error of RocksDB is about what the files hold; rocksdict raises nothing but text.

    Its errors are of no more specific class than `Exception`, which a user may raise, too: with another text.
    """
    if type(error) is not Exception:
        return False
    text = str(error)
    if "IO error" in text:  # also within "Corruption", where a file cannot be opened for lack of descriptors
        return "No such file or directory" in text
    return text.startswith(("Corruption", "Invalid argument", "Not implemented"))
