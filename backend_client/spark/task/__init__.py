"""What runs in a task: a partition of an operator for one batch."""
