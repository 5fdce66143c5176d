"""Sinks that publish exactly once: their protocol, and those for Kafka, PostgreSQL and Parquet files."""
