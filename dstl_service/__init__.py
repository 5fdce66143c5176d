"""The changelog service: batches the change sets of a host's tasks into shared objects and keeps checkpoints."""

__version__ = "0.1.0"
