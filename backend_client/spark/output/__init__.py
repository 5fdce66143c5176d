"""A result's way out of a query: into functions and sinks of Spark, or into the log and from there into a sink."""
