"""The Spark cluster of `tools.servers`, as tests import it."""

from __future__ import annotations

from tools.servers.spark_cluster import SparkCluster

__all__ = ["SparkCluster"]
