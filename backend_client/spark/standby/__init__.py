"""The driver's part of standbys: which host runs a partition, and which one keeps a copy of its table."""
