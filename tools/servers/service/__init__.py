"""A service of our own, started in several ways, and a job without Spark that calls it."""
