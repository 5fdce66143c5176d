"""A job's metadata on the object store: creation and reading of manifests, epochs, savepoints and lives."""
