"""Spark's own ``transformWithState`` against this backend, workload by workload: ``python -m loadtest.bench``."""
