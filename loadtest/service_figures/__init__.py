"""The figures of the service, one module each, with their goals."""
