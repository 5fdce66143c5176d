"""Changes the parallelism of operators while their query runs, on request or by a rule."""
