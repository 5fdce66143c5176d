"""A cluster of Spark, and archives and byte code with which its processes start sooner."""
