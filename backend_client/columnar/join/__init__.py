"""The join of two streams over columns."""
