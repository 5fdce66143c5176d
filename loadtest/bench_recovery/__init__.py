"""``make bench-recovery``: how long output stops when an executor is lost, and what is missing afterwards."""
