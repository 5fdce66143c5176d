"""
The columnar API: operators that process all keys of a batch at once, as Arrow arrays. See docs/columnar.md.

It does not depend on Spark; `backend_client.spark.task.columnar_calls` runs it.
"""

from backend_client.columnar.aggregate import Aggregate
from backend_client.columnar.aggregations import Aggregation, Count, Last, Max, Mean, Min, Sum, TopK
from backend_client.columnar.deduplicate import Deduplicate
from backend_client.columnar.distinct import ApproxDistinct
from backend_client.columnar.processor import BatchMoment, ColumnarProcessor, KeyBatch, KeyResults
from backend_client.columnar.windows import Windows, sliding, tumbling

__all__ = [
    "Aggregate",
    "Aggregation",
    "ApproxDistinct",
    "BatchMoment",
    "ColumnarProcessor",
    "Count",
    "Deduplicate",
    "KeyBatch",
    "KeyResults",
    "Last",
    "Max",
    "Mean",
    "Min",
    "Sum",
    "TopK",
    "Windows",
    "sliding",
    "tumbling",
]
