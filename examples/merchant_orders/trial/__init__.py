"""The pipeline's trial: its programs are started and killed, and the result is read, compared and drawn."""
