"""
Estimates the number of distinct values with HyperLogLog sketches of Apache DataSketches.

A sketch has that library's documented format; few values take some bytes, many take 2^(log2_size - 1).
No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from backend_client.columnar.aggregations import Aggregation
from backend_client.columnar.reductions import Groups
from backend_client.columnar.values import Bools
from backend_client.option_checks import check_whole
from storage.errors import CorruptDataError, InvalidInputError


@dataclass(frozen=True)
class ApproxDistinct(Aggregation):
    """
    The approximate number of distinct values; nulls are ignored.

    Args:
        log2_size: Size of a sketch: the relative error is about 0.83 / sqrt(2 ** log2_size), 1.3 % with 12. 4 to 21.

    Raises:
        InvalidInputError: The package ``datasketches`` is not installed (extra ``columnar``).
    """

    log2_size: int = 12
    meaning = "distinct values"

    @property
    def output_name(self) -> str:
        """The name of the output column; Spark's by default."""
        return self.name or f"approx_count_distinct({self.column})"

    def state_types(self, rows: pa.Schema) -> list[pa.DataType]:
        """Return a sketch."""
        _library()
        check_whole(f"{self.output_name}: log2_size", self.log2_size, 4, 21)
        if pa.types.is_nested(self._kind(rows)):
            raise InvalidInputError(f"{self.output_name}: only values of simple types can be counted")
        return [pa.binary()]

    def result_type(self, rows: pa.Schema) -> pa.DataType:
        """Return an integer type."""
        return pa.int64()

    def update(self, rows: pa.RecordBatch, groups: Groups, old: Sequence[pa.Array], known: Bools) -> list[pa.Array]:
        """Add the values of each key to its sketch."""
        library = _library()
        values = _plain(rows.column(self.column))
        ends = [*groups.starts[1:].tolist(), groups.rows]
        sketches = []
        for begin, end, stored in zip(groups.starts.tolist(), ends, old[0].to_pylist(), strict=True):
            sketch = library.hll_sketch(self.log2_size) if stored is None else _read(library, stored)
            for value in values[begin:end]:
                if value is not None:
                    sketch.update(value)
            sketches.append(sketch.serialize_compact())
        return [pa.array(sketches, pa.binary())]

    def result(self, state: Sequence[pa.Array]) -> pa.Array:
        """Estimate."""
        library = _library()
        return pa.array([round(_read(library, data).get_estimate()) for data in state[0].to_pylist()], pa.int64())


def _library() -> Any:
    try:
        import datasketches
    except ImportError as error:
        raise InvalidInputError(
            "ApproxDistinct needs the package datasketches: install it on the driver and all workers"
        ) from error
    return datasketches


def _read(library: Any, data: bytes) -> Any:
    try:
        return library.hll_sketch.deserialize(data)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise CorruptDataError(f"a stored sketch of distinct values cannot be read: {error}") from error


def _plain(column: pa.Array) -> list[Any]:
    """Return values in the library's types: integers, floats or text."""
    kind = column.type
    if pa.types.is_integer(kind):
        return column.to_pylist()  # type: ignore[no-any-return]
    if pa.types.is_floating(kind):
        # Minus zero and zero are one value, and so are all NaNs.
        plain = pc.if_else(pc.is_nan(column), pa.scalar(float("nan"), kind), pc.add(column, pa.scalar(0.0, kind)))
        return plain.to_pylist()  # type: ignore[no-any-return]
    if pa.types.is_boolean(kind):
        return column.cast(pa.uint8()).to_pylist()  # type: ignore[no-any-return]
    if pa.types.is_date32(kind):
        return column.view(pa.int32()).to_pylist()  # type: ignore[no-any-return]
    if pa.types.is_timestamp(kind):
        return column.view(pa.int64()).to_pylist()  # type: ignore[no-any-return]
    if pa.types.is_string(kind):
        encoded = column.view(pa.binary()).to_pylist()  # may be invalid UTF-8
        values = [None if value is None else value.decode(errors="backslashreplace") for value in encoded]
    else:
        values = column.to_pylist()
    if pa.types.is_binary(kind):
        values = [None if value is None else value.hex() for value in values]
    return [None if value is None else f"={value}" for value in values]  # the library ignores empty text
