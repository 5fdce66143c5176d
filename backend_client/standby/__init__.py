"""Standbys: copies of tables on a second host, which follow the job's checkpoints; see docs/standby.md."""
