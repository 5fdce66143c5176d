"""A job's metadata on the object store: how manifests, epochs, savepoints and lives come to be, and are read."""
