"""Starts the real servers that benchmarks, load tests and integration tests need."""
