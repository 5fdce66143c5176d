"""Links: connections that the sidecars of a job's hosts open to its coordinator, so that they need no address."""
