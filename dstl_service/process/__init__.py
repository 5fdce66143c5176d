"""What concerns the process as a whole: its log lines, memory, TCP connections and idle time."""
