"""What a job's metadata looks like on the object store: keys, manifests, indexes and records. No I/O."""
