"""Sinks that publish exactly once: their protocol, and those for Kafka, PostgreSQL, Parquet files and Delta Lake."""
