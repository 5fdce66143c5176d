"""
Chooses what a test with drawn events is drawn from.

Continuous integration repeats itself, so that it judges the change and not the draw. Everywhere else each run draws new
values, as do `make modelcheck` and `make chaos`; what they find is kept as a test.
"""

from __future__ import annotations

import os
import random

_OF_CI = 20_240_501


def chosen_seed(variable: str | None = None) -> int:
    """Return the seed in an environment variable; without one, always the same where CI is set, else a new one."""
    named = os.environ.get(variable) if variable else None
    if named:
        return int(named)
    return _OF_CI if os.environ.get("CI") else random.SystemRandom().randrange(1 << 32)
