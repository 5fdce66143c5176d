"""The sidecars of other hosts: where they are, and what is asked of them."""
