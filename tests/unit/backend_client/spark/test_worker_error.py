"""The error of a failed task."""

from __future__ import annotations

import pytest
from pyspark.errors import PythonException

from backend_client.spark.driver.repeating import helps_to_repeat
from backend_client.spark.private.worker_error import failed_task

FRAMES = 'Traceback (most recent call last):\n  File "job.py", line 7, in handleInputRows\n    1 / 0\n    ~~^~~\n'
HEAD = "\n  An exception was thrown from the Python worker:\n"


@pytest.mark.parametrize(
    ("trace", "cause"),
    [
        (f"{FRAMES}ZeroDivisionError: division by zero\n SQLSTATE: 39000", "ZeroDivisionError: division by zero"),
        (f"{FRAMES}ValueError: two\nlines", "ValueError: two\nlines"),
        (f"{FRAMES}KeyError: 1\n\nDuring handling:\n\n{FRAMES}ValueError: last", "ValueError: last"),
    ],
)
def test_error_begins_with_what_happened(trace: str, cause: str) -> None:
    """The operator and the last error of the worker come first, and the whole trace after them."""
    text = str(failed_task(PythonException(HEAD + trace), "totals"))

    assert text == f"operator 'totals' failed: {cause}\n{trace}"


def test_trace_of_the_jvm_is_kept() -> None:
    """A user who has switched Spark's stack traces on sees them, and they are not taken for the worker's error."""
    jvm = "\n\nJVM stacktrace:\norg.apache.spark.SparkException\n\tat org.apache"

    text = str(failed_task(PythonException(f"{HEAD}{FRAMES}KeyError: 1\n{jvm}"), "totals"))

    assert text.startswith("operator 'totals' failed: KeyError: 1\nTraceback")
    assert text.endswith(jvm)


def test_text_without_a_trace_is_kept() -> None:
    """An unknown form of the error is not cut."""
    assert str(failed_task(PythonException("no trace"), "totals")) == "operator 'totals' failed: no trace"


def test_lost_changes_still_repeat_the_batch() -> None:
    """A task that found changes lost has its batch executed again."""
    assert helps_to_repeat(
        failed_task(PythonException(f"{HEAD}{FRAMES}storage.errors.LostChangesError: gone"), "totals")
    )
