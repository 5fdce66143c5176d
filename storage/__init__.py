"""
Where state lives: value types, the bytes of segment objects, and the stores that hold them.

The package knows nothing of HTTP, Spark or the state table.
Layers, lowest first; a module imports only from lines above its own:

    errors, checksum, clock          no imports of the project
    model, retry_policy              values and decisions, no I/O
    segment_format                   segment objects as bytes, no I/O
    object_store                     what a store promises
    memory_store, local_store,
    s3_store                         the stores; s3_store alone imports boto3
    segment_reader, open, testing    reading back, opening by URL, doubles for tests
"""
