"""One page of all measurements: `make report`. Measures nothing itself."""
