"""Measures exactly-once output to Kafka beside Spark's own Kafka sink."""
