"""A change's path through the project's files, traced on a real run: `python -m tools.walk`."""
