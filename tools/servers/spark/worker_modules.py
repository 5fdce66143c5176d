"""
Byte code for the modules of PySpark that Python workers import, in the environment's folder.

Workers import PySpark from an archive of sources, `python/lib/pyspark.zip` of its package. Python keeps no byte code of
what it imports from an archive, so each process that starts workers compiles all of it again, 0.6 s of a processor, and
the tests start hundreds of them. Byte code is added to the archive, beside the sources; another version of Python
ignores it.
"""

from __future__ import annotations

import importlib.util
import marshal
import os
import shutil
import sys
import tempfile
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path, PurePosixPath

_UNCHECKED_HASH = 1  # PEP 552: the source is not compared, for archives keep times without a zone
_NOT_IN_WORKERS = frozenset({"pyspark/ml", "pyspark/mllib", "pyspark/pandas", "pyspark/tests", "pyspark/testing"})


def compile_worker_modules(package: Path | None = None) -> list[Path]:
    """
    Add byte code to the archives that have none, and return all archives.

    A module is compiled as the installed one of its name, whose byte code exists as a rule.

    Args:
        package: The folder of PySpark's package, by default that of this environment.
    """
    folder = package or Path(_installed("pyspark")).parent
    archives = sorted((folder / "python" / "lib").glob("*.zip"))
    for path in archives:
        with zipfile.ZipFile(path) as archive:
            is_compiled = any(name.endswith(".pyc") for name in archive.namelist())
        if not is_compiled:
            _compile(path, folder.parent)
    return archives


def _installed(name: str) -> str:
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} is not installed in {sys.prefix}"
    assert spec.origin is not None, f"{name} has no file"
    return spec.origin


def _compile(path: Path, installed: Path) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(descriptor)
    made = Path(name)
    try:
        shutil.copy(path, made)  # with its rights
        with zipfile.ZipFile(made, "a") as archive:
            for source in archive.namelist():
                if _is_for_workers(PurePosixPath(source)):
                    code = _byte_code(archive.read(source), installed / source)
                    if code is not None:
                        archive.writestr(f"{source}c", code)
        os.replace(made, path)  # a process that reads the other one goes on with it
    finally:
        made.unlink(missing_ok=True)


def _is_for_workers(source: PurePosixPath) -> bool:
    is_skipped = "tests" in source.parts or any(str(parent) in _NOT_IN_WORKERS for parent in source.parents)
    return source.suffix == ".py" and not is_skipped


def _byte_code(source: bytes, installed: Path) -> bytes | None:
    """Return a file of byte code; None if the installed module is another one."""
    if not installed.is_file() or installed.read_bytes() != source:
        return None
    code = SourceFileLoader(installed.stem, str(installed)).get_code(installed.stem)
    header = importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH.to_bytes(4, "little") + importlib.util.source_hash(source)
    return header + marshal.dumps(code)
