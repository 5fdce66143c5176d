"""Another user of the machine, for real: only where the tests run as root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

NOBODY = 65534
IS_ROOT = os.geteuid() == 0


@contextmanager
def another_user() -> Iterator[None]:
    """Be another user within this context: what connects, listens and is made is theirs. Needs root."""
    assert IS_ROOT
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
