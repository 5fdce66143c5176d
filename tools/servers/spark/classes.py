"""
The archive of Spark's classes with which the JVMs of tests start in half of the time, in the environment's folder.

A JVM of a test lives for seconds or minutes, and most of that is the loading of the same classes. An archive that does
not fit, of another Java for one, is ignored; without one, tests run as well, and longer.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_CHECKPOINT_FILES = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
"""Renames a checkpoint's files with one call. Spark's choice for local folders starts 25 programs for each batch."""
ARCHIVE = Path(sys.prefix, "spark-classes.jsa")


def class_archive() -> Path:
    """Return the archive, made if it is missing, which takes about a minute."""
    # Options of tests must come without it.
    from backend_client.spark.api.class_archive import write_class_archive

    if not ARCHIVE.exists():
        os.environ.setdefault("JAVA_TOOL_OPTIONS", options_of_short_jvms(None))
        write_class_archive(ARCHIVE)
    return ARCHIVE


def options_of_short_jvms(archive: Path | None) -> str:
    """
    Return Java's options for JVMs that live for seconds or minutes, in the form of ``JAVA_TOOL_OPTIONS``.

    The optimizing compiler would take more than it gives, and so would a collector with threads of its own. Queries
    of Spark keep their checkpoints as they do in an object store.

    Args:
        archive: The archive of classes, if there is one; JVMs with other classes silently ignore it.
    """
    options = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
    options.append(f"-Dspark.sql.streaming.checkpointFileManagerClass={_CHECKPOINT_FILES}")
    if archive is not None:
        options += [f"-XX:SharedArchiveFile={archive}", "-Xlog:cds*=off"]
    return " ".join(options)
