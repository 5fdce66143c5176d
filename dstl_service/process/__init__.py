"""Process-wide facilities: logs, memory, threads and slots that jobs share, TCP keep-alive, idle exit."""
