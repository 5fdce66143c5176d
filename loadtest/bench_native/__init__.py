"""Spark's native stateful operators against the ready-made columnar ones: ``python -m loadtest.bench_native``."""
