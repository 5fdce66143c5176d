"""The driver's side of failover: what partitions do while their tables are being restored, and the restores."""
