"""Start-up code for the real servers that integration tests need."""
