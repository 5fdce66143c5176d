"""The client side of the sidecar service: requests, its life, and the session of a job."""
