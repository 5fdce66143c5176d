"""State variables, types, expiry and timers, encoded as the bytes that a table stores."""
