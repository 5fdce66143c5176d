"""Example jobs on the changelog state backend."""
