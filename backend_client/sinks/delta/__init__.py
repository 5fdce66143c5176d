"""A sink for tables of Delta Lake."""

from backend_client.sinks.delta.sink import DeltaSink

__all__ = ["DeltaSink"]
