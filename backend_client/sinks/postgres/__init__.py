"""The sink that publishes to a table of PostgreSQL."""

from backend_client.sinks.packages import needed_for

with needed_for("PostgresSink", "psycopg", "psycopg[binary]>=3.2"):
    from backend_client.sinks.postgres.sink import PostgresSink

__all__ = ["PostgresSink"]
