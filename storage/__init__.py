"""
Storage of state: value types, the byte format of segment objects, and the object stores.

The package does not depend on HTTP, Spark or the state table.
Layers, lowest first; a module imports only from lines above its own:

    errors, checksum, clock,
    lost_bytes                       no imports of the project
    model, retry_policy              values and decisions, no I/O
    segment_format                   segment objects as bytes, no I/O
    object_store                     the contract of a store
    local_files, mounts              files on disks, and where disks are mounted
    s3_session                       sessions of boto3
    memory_store, local_store,
    s3_store                         the stores; s3_session alone imports boto3
    segment_reader, open, testing    reading back, opening by URL, doubles for tests
"""
