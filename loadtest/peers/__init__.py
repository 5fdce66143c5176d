"""The same job in other engines: rows per second, processor time, memory, and whether a kill leaves every key right."""
