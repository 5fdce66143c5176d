"""
The flights of ``make demo``: departures and weather joined as streams, then statistics per route.

- `job` is the streaming query, and the part to read first; `processors` are its two stateful operators, and `files`
  its output.
- `data` prepares the input, and `answer` computes the result as one batch, in pandas.
- `demo` starts and kills the job (`processes`), compares its output with the answer, and writes the `report`.
"""
