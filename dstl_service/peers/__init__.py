"""The sidecars of other hosts: their addresses, and calls to them."""
