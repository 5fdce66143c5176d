"""The figures of the service, one module each: what it measures, and the goals that it must reach."""
