"""The metrics that the service exports."""
