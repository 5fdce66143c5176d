"""Metrics exported by the service."""
