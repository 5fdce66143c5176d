"""Benchmarks, load tests and their reports."""
