"""Groups of cases whose attack is the conduct of a client, a peer, a host or another user."""
