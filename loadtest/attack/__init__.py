"""Hostile requests to a service, its neighbours and its host, as a suite that can be repeated: ``make attack``."""
