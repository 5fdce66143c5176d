"""Hostile requests to a service, its neighbours and its host, as a repeatable suite: ``make attack``."""
