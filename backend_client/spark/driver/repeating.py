"""
Which errors execute a batch again. No I/O.

`BatchMustWaitError` (`backend_client.spark.failover.failover`) does so, too, without counting as a try.
"""

from __future__ import annotations

from pyspark.errors import PySparkException

from backend_client.spark.driver.kept_output import LOST_BLOCK
from backend_client.spark.driver.receipts import STALE_OUTPUT
from storage.errors import LostChangesError, UnavailableError


def helps_to_repeat(error: Exception) -> bool:
    """Say whether a failed batch may succeed when it is executed again."""
    if isinstance(error, LostChangesError):
        return True
    if not isinstance(error, PySparkException) and "Py4J" not in type(error).__name__:
        return False
    text = str(error)
    # A task that lost its sidecar midway finds another one when it runs again.
    signs = (STALE_OUTPUT, LOST_BLOCK, LostChangesError.__name__, UnavailableError.__name__)
    return any(sign in text for sign in signs)
