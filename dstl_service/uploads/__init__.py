"""Uploads of segment objects, hedged and retried."""
