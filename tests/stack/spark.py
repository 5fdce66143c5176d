"""The Spark cluster of `loadtest.stack`, as tests import it."""

from __future__ import annotations

from loadtest.stack.spark_cluster import SparkCluster

__all__ = ["SparkCluster"]
