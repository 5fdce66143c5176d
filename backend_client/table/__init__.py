"""A partition's local RocksDB table: its files, journal and snapshots."""
