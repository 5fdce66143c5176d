"""State variables, their types, expiry and timers, as the bytes that a table stores."""
