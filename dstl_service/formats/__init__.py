"""Formats of a job's metadata on the object store: keys, manifests, indexes and records. No I/O."""
