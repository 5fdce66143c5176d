"""A sink for tables of Delta Lake."""

from backend_client.sinks.packages import needed_for

with needed_for("DeltaSink", "deltalake", "deltalake>=1.6"):
    from backend_client.sinks.delta.sink import DeltaSink

__all__ = ["DeltaSink"]
