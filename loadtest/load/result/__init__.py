"""The result of a load test: usage of the machine, figures, goals and verdict. No I/O, but for reading thresholds."""
