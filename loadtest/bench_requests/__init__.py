"""Requests at an S3 server, counted, of a query on this backend and on Spark's own state store."""
