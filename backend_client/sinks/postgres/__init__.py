"""The sink that publishes to a table of PostgreSQL."""

from backend_client.sinks.postgres.sink import PostgresSink

__all__ = ["PostgresSink"]
