"""The changelog service: batches change sets of all tasks of a host into shared objects and keeps the checkpoints."""

__version__ = "0.1.0"
