"""
The error of a batch that Spark interrupts, because its query is being stopped.

Spark looks for an interruption in the text of a Python function's error. Its regular expression takes a stack frame for
each character: on the stack trace of a Java error it overflows, and a thousand lines on the driver's error output say
so whenever a query is stopped within a batch.
"""

from __future__ import annotations

from py4j.protocol import Py4JJavaError

_INTERRUPTIONS = (
    "java.lang.InterruptedException",
    "java.io.InterruptedIOException",
    "java.nio.channels.ClosedByInterruptException",
)
"""The texts that Spark takes for an interruption."""


class InterruptedBatchError(Exception):
    """A batch was interrupted; the text is short, and Spark finds in it what it looks for."""


def interruption(error: Exception) -> InterruptedBatchError | None:
    """Return a short error to raise instead of one from the JVM that says that the batch was interrupted; else None."""
    if not isinstance(error, Py4JJavaError):
        return None
    text = str(error)
    found = next((name for name in _INTERRUPTIONS if name in text), None)
    if found is None:
        return None
    return InterruptedBatchError(f"py4j.protocol.Py4JJavaError: An error occurred while calling a batch: {found}")
