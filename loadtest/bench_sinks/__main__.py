"""
``make bench-sinks``: what exactly-once output to Kafka costs beside Spark's own Kafka sink, which writes at least once.

Records per second and CPU time with a source that always has more; latency at a trigger of 500 ms. Writes
``reports/bench-sinks.json``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from loadtest.bench_sinks import latency, throughput
from tools.reporting.figures import Figure, format_number
from tools.reporting.target import TargetReport, is_set
from tools.servers.kafka import KafkaBroker, connector_jars
from tools.spark_session import start_session


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the report; return the exit code."""
    parser = argparse.ArgumentParser(description="Measure exactly-once output to Kafka.")
    parser.add_argument("--only", choices=["throughput", "latency"])
    parser.add_argument("--rounds", type=int, default=1 if is_set("SHORT") else 3)
    parser.add_argument("--seconds", type=float, default=5 if is_set("SHORT") else 30, help="length of a window")
    parser.add_argument("--rows", type=int, default=2_000 if is_set("SHORT") else 50_000, help="rows of a batch")
    options = parser.parse_args(arguments)
    report = TargetReport("bench-sinks")
    jars = ",".join(map(str, connector_jars()))
    spark = start_session("dstl-bench-sinks", {"driver.memory": "3g", "jars": jars})
    figures: list[Figure] = []
    try:
        with KafkaBroker(partitions=2) as broker:
            if options.only != "latency":
                figures += throughput.measure(spark, broker, options.rounds, options.seconds, options.rows)
                report.write(figures)
            if options.only != "throughput":
                figures += latency.measure(spark, broker, options.rounds, options.seconds)
    finally:
        spark.stop()
    for figure in figures:
        print(f"{figure.name:60} {format_number(figure.value):>12} {figure.unit:8} {figure.goal or ''}")
    return report.write(figures)


if __name__ == "__main__":
    sys.exit(main())
