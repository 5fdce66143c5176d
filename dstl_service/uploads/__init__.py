"""Uploads of segment objects: batched, hedged and retried."""
