"""Invalid declarations of operators."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.streaming import StatefulProcessor

from backend_client.columnar import Aggregate
from backend_client.spark.api.operators import TransformOptions, columnar_operator, row_operator
from storage.errors import InvalidInputError


def test_class_instead_of_processor_is_refused() -> None:
    """A class in place of a processor is refused with the fix; its `init` would fail because `self` is missing."""
    nothing: Any = None

    with pytest.raises(InvalidInputError, match="is the class StatefulProcessor; give an object"):
        # A class where an object is expected.
        row_operator(nothing, TransformOptions(StatefulProcessor, "a long", "Update", "None"))  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="is the class Aggregate"):
        # A class where an object is expected.
        columnar_operator(nothing, Aggregate, None, "Update", name=None, parallelism=None)  # type: ignore[arg-type]
