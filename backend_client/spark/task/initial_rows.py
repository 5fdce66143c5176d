"""The rows of an operator's initial state, which reach its tasks together with the input rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from pyspark.sql import Row

from backend_client.spark.task.rows import row_factory


@dataclass(frozen=True, slots=True)
class InitialRows:
    """Separates, in the tasks, the rows that `initial_state.joined` has unioned."""

    key_count: int
    input_names: tuple[str, ...]
    initial_names: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """The columns of the unioned rows."""
        return [str(at) for at in range(self.key_count + 1 + len(self.input_names) + len(self.initial_names))]

    def splitter(self) -> Callable[[Iterable[Row], Callable[[Row], None]], Iterator[Row] | None]:
        """Return a function that passes a key's initial rows to a callback and returns its input rows, or None."""
        marker = len(self.input_names)
        initial = marker + 1 + self.key_count
        new_input, new_initial = row_factory(self.input_names), row_factory(self.initial_names)

        def split(rows: Iterable[Row], take: Callable[[Row], None]) -> Iterator[Row] | None:
            left = iter(rows)
            for row in left:
                if row[marker]:
                    return (new_input(item[:marker]) for item in chain([row], left))
                take(new_initial(row[initial:]))
            return None

        return split
