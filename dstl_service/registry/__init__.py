"""A job's metadata on the object store: keys, manifests, epochs, and the indexes of snapshots."""
