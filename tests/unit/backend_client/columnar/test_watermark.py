"""Requirements of columnar operators on their input and output, checked before the query starts."""

from __future__ import annotations

import logging
from datetime import timedelta

import pyarrow as pa
import pytest
from pyspark.sql.types import ArrayType, DataType, StringType, StructType

from backend_client.batch_time import BatchTime
from backend_client.columnar import Aggregate, ColumnarProcessor, Count, Deduplicate, KeyBatch, KeyResults, tumbling
from backend_client.spark.columnar_plan import ColumnarPlan
from backend_client.spark.event_time import DELAY_KEY
from storage.errors import InvalidInputError
from tests.unit.backend_client.columnar.columnar_task import with_watermark

TIME = pa.timestamp("us", "UTC")
ROWS = pa.schema([("k", pa.int32()), ("at", TIME), ("came", TIME)])
SECOND = timedelta(seconds=1)
WINDOWS = Aggregate(Count(), windows=tumbling("at", SECOND))
REPETITIONS = Deduplicate("at", SECOND)


class Ending(ColumnarProcessor):
    """A user's processor whose state ends."""

    expires = True

    def state_schema(self, rows: pa.Schema) -> pa.Schema:
        return pa.schema([("n", pa.int64())])

    def process(self, batch: KeyBatch) -> KeyResults:
        return KeyResults(batch.state)


def plan(processor: ColumnarProcessor, mode: str, *marked: str, is_first: bool = True) -> ColumnarPlan:
    return ColumnarPlan.of(processor, mode, with_watermark(ROWS, *marked), ["k"], is_first=is_first)


def test_append_mode_needs_a_watermark() -> None:
    """Windows that no watermark ends would never be emitted while their state grows, so the query does not start."""
    with pytest.raises(InvalidInputError, match=r"Aggregate .* no watermark: call withWatermark on 'at'.*'Update'"):
        plan(WINDOWS, "Append")


@pytest.mark.parametrize(
    ("processor", "mode"),
    [(WINDOWS, "Update"), (REPETITIONS, "Append"), (REPETITIONS, "Update"), (Ending(), "Append")],
)
def test_state_without_end_causes_a_warning(
    processor: ColumnarProcessor, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If an operator emits output without a watermark, a warning says that its state never ends."""
    with caplog.at_level(logging.WARNING, "backend_client"):
        plan(processor, mode)

    [record] = caplog.records
    assert type(processor).__name__ in record.getMessage()
    assert "withWatermark" in record.getMessage()


@pytest.mark.parametrize("processor", [WINDOWS, REPETITIONS])
@pytest.mark.parametrize("mode", ["Append", "Update"])
@pytest.mark.parametrize(("is_first", "words"), [(True, "withWatermark on 'at'"), (False, "eventTimeColumnName")])
def test_watermark_of_another_column_is_refused(
    processor: ColumnarProcessor, mode: str, *, is_first: bool, words: str
) -> None:
    """Times are compared with the watermark of their own column; with another one, rows would be dropped as late."""
    with pytest.raises(InvalidInputError, match=f"times in 'at', but the watermark is on 'came': .*{words}"):
        plan(processor, mode, "came", is_first=is_first)


@pytest.mark.parametrize("processor", [WINDOWS, REPETITIONS, Ending(), Aggregate(Count())])
@pytest.mark.parametrize("is_first", [True, False])
def test_fitting_watermark_is_accepted(
    processor: ColumnarProcessor, caplog: pytest.LogCaptureFixture, *, is_first: bool
) -> None:
    """A watermark on the column itself is accepted, also if other columns have one."""
    plan(processor, "Update", "at", is_first=is_first)
    plan(processor, "Update", "came", "at", is_first=is_first)
    assert caplog.records == []


def test_no_watermark_is_needed_without_ends(caplog: pytest.LogCaptureFixture) -> None:
    """Totals that never end need no watermark and accept any."""
    plan(Aggregate(Count()), "Update")
    plan(Aggregate(Count()), "Update", "came")
    plan(Ending(), "Update", "came")
    assert caplog.records == []


@pytest.mark.parametrize("mode", ["Append", "Update"])
def test_unmarked_times_after_an_operator_cause_a_warning(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """An operator's output may match the stream's watermark without a mark: a warning says how to set the mark."""
    plan(WINDOWS, mode, is_first=False)
    [record] = caplog.records
    assert "eventTimeColumnName" in record.getMessage()


def test_rows_that_pass_keep_their_watermark() -> None:
    """After Deduplicate, the next operator finds the watermark on the same column; windows emit other times."""
    output = plan(REPETITIONS, "Append", "at").output_schema()
    assert {field.name: field.metadata for field in output} == {"k": {}, "at": {DELAY_KEY: 5000}, "came": {}}
    assert all(not field.metadata for field in plan(REPETITIONS, "Append").output_schema())
    assert all(not field.metadata for field in plan(WINDOWS, "Append", "at").output_schema())


@pytest.mark.parametrize(("marked", "known"), [(["at"], 0), ([], None)])
def test_watermark_begins_at_1970(marked: list[str], known: int | None) -> None:
    """Rows up to 1970 are late from the first batch on, as in Spark; without a watermark (then it is 0), none are."""
    moments = plan(WINDOWS, "Update", *marked).moments(BatchTime(5, 0, 0))

    assert [moment.watermark_ms for moment in moments] == [known, known]


@pytest.mark.parametrize("text", [StringType("UTF8_LCASE"), ArrayType(StructType().add("x", StringType("UNICODE_CI")))])
def test_text_that_is_not_compared_by_bytes_is_refused(text: DataType) -> None:
    """Arrow drops a collation, so minima, maxima and later comparisons would be wrong."""
    rows = StructType().add("k", StringType()).add("v", text)

    with pytest.raises(InvalidInputError, match=r"'v' .*collation other than UTF8_BINARY.*cast it"):
        ColumnarPlan.of(Aggregate(Count()), "Update", rows, ["k"])


@pytest.mark.parametrize("name", ["k", "window_end"])
def test_two_columns_of_one_name_are_refused(name: str) -> None:
    """A result called like a key or a window's column has no place in the output: its first batch failed."""
    windows = Aggregate(Count(name=name), windows=tumbling("at", SECOND))

    with pytest.raises(InvalidInputError, match=f"two columns named '{name}'.*another name"):
        plan(windows, "Update", "at").output_schema()
