"""Proxies between a service and its store that delay, refuse, cut or lose requests."""
