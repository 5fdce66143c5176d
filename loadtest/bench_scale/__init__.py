"""Latency, manifests and costs by the number of hosts and partitions."""
