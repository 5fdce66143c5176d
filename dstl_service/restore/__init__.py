"""From a manifest to the bytes that a table is restored from, and the caches on the way."""
