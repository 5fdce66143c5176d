"""Restores: from a manifest to the bytes that a table is restored from, and the caches between them."""
