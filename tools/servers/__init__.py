"""Start-up code for the real servers that benchmarks, load tests and integration tests need."""
