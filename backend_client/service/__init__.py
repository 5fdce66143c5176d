"""The client side of the sidecar service: requests, its start and end, and a job's session."""
