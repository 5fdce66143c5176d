"""What is kept and what is deleted: retention, garbage, and jobs that were deleted."""
