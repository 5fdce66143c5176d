"""
The cause of a failure in a task's Python worker, from the text of Spark's error.

That text and the error's stack both have the worker's stack trace. Spark then takes text and stack for the error of the
query: the cause, and the line of the user's program, are hidden among a hundred others.
"""

from __future__ import annotations

from pyspark.errors import PySparkException, PythonException

_TRACE = "Traceback (most recent call last):\n"
_JVM_TRACE = "\n\nJVM stacktrace:\n"


class FailedTaskError(PySparkException):
    """An operator's task failed; the text says first what happened, and then where in the worker."""


def failed_task(error: PythonException, operator: str) -> FailedTaskError:
    """Return the error to raise for an operator whose task failed."""
    _, begin, trace = str(error).partition(_TRACE)
    trace, *jvm_trace = (begin + trace).partition(_JVM_TRACE)  # which the user's settings ask for
    lines = trace.rpartition(_TRACE)[2].splitlines()
    if lines and lines[-1].startswith(" SQLSTATE"):
        del lines[-1]
    said = next((number for number, line in enumerate(lines) if not line.startswith(" ")), None)
    if not begin or said is None:
        return FailedTaskError(f"operator {operator!r} failed: {error}")
    cause = "\n".join(lines[said:])
    return FailedTaskError(f"operator {operator!r} failed: {cause}\n{trace.rstrip()}{''.join(jvm_trace)}")
