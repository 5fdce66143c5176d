"""The code of a task: one partition of an operator in one batch."""
