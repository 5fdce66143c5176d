"""
A columnar aggregation: each product's sales per quarter of an hour, with its three most expensive orders.

No Python code runs per row or per key: the operator gets a batch's orders as Arrow arrays. A window is emitted once,
when the watermark has passed its end. The tests compare with Spark's batch aggregation.
"""

from __future__ import annotations

import random
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql import SparkSession

from backend_client import ChangelogStateBackend
from backend_client.columnar import Aggregate, Count, Max, Mean, Sum, TopK, tumbling
from examples.common import START_S, main, read_files, write_files

ORDERS = "product STRING, time TIMESTAMP, cents BIGINT"


def build(spark: SparkSession, backend: ChangelogStateBackend, folder: Path) -> Any:
    """Build the query: each batch yields the windows that are over."""
    orders = read_files(spark, folder, ORDERS).withWatermark("time", "5 minutes")
    revenue = Aggregate(
        Count(name="orders"),
        Sum("cents", name="cents"),
        Mean("cents", name="mean_cents"),
        Max("time", name="last"),
        TopK("cents", limit=3, name="dearest"),
        windows=tumbling("time", timedelta(minutes=15)),
    )
    return backend.transform_columns(orders.groupBy("product"), revenue, outputMode="Append")


def write_input(folder: Path, products: int = 500, orders: int = 60_000, files: int = 8) -> None:
    """Write four hours of orders, half an hour per file; some arrive up to four minutes late."""
    chance = random.Random(2026)
    slices: list[list[dict[str, Any]]] = [[] for _ in range(files)]
    for _ in range(orders):
        second = chance.random() * 1800 * files
        came = second + chance.choice([0, 0, chance.random() * 240])
        product = int(products * chance.random() ** 3)  # some sell much more than others
        cents = round(chance.lognormvariate(7, 1))
        slices[min(int(came / 1800), files - 1)].append(_order(f"product-{product:03d}", second, cents))
    # Orders of the next day move the watermark past all windows, so they are emitted.
    write_files(folder, [*slices, *([_order("next day", 86_400, 1)],) * 2])


def _order(product: str, second: float, cents: int) -> dict[str, Any]:
    time = datetime.fromtimestamp(START_S + second, UTC).isoformat(timespec="milliseconds")
    return {"product": product, "time": time, "cents": cents}


def show(windows: pd.DataFrame) -> str:
    """Return a summary of the result, and the best windows."""
    best = windows.sort_values("cents", ascending=False).head(5)
    return (
        f"{windows['orders'].sum()} orders of {windows['product'].nunique()} products in {len(windows)} windows. "
        f"The best ones:\n{best.to_string(index=False)}"
    )


if __name__ == "__main__":
    sys.exit(main("A columnar aggregation over tumbling windows.", write_input, build, show))
