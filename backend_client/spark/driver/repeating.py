"""
Which errors execute a batch again, and what counts as one. No I/O.

`BatchMustWaitError` (`backend_client.spark.failover.failover`) does so, too, without counting as a try.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def ending_as_errors() -> Iterator[None]:
    """
    Raise an error for what would end the thread, such as `SystemExit` or the panic of a native library.

    Py4J answers Spark for no other exceptions than errors, and the query would wait for ever.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"the batch was ended by {type(error).__name__}: {error}") from error
