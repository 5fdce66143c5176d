"""Byte code in PySpark's archive of modules: what workers import is the same, and is not compiled again."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools.servers.spark.worker_modules import compile_worker_modules

SOURCE = "value = 1\n"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An installed package with an archive of its modules, one of which differs from the installed one."""
    found = tmp_path / "pyspark" / "python" / "lib" / "pyspark.zip"
    found.parent.mkdir(parents=True)
    with zipfile.ZipFile(found, "w") as made:
        for name in ("__init__.py", "used.py", "changed.py", "tests/test_used.py", "pandas/frame.py"):
            module = Path("pyspark", name)
            (tmp_path / module).parent.mkdir(exist_ok=True)
            (tmp_path / module).write_text(SOURCE if name != "changed.py" else "value = 2\n", encoding="utf-8")
            made.writestr(str(module), SOURCE)
    return found


def compiled(archive: Path) -> list[str]:
    with zipfile.ZipFile(archive) as made:
        return [name for name in made.namelist() if name.endswith(".pyc")]


def test_modules_of_workers_are_compiled_once(archive: Path) -> None:
    """Sources stay; byte code comes for what workers import, but not for a module that is not the installed one."""
    assert compile_worker_modules(archive.parents[2]) == [archive]
    content = archive.read_bytes()
    assert compiled(archive) == ["pyspark/__init__.pyc", "pyspark/used.pyc"]
    with zipfile.ZipFile(archive) as made:
        assert made.read("pyspark/used.py").decode() == SOURCE

    compile_worker_modules(archive.parents[2])
    assert archive.read_bytes() == content
    assert list(archive.parent.iterdir()) == [archive]


def test_workers_import_the_byte_code(archive: Path) -> None:
    """Python takes the byte code whatever times the archive has, and the source where there is none."""
    compile_worker_modules(archive.parents[2])
    program = "import pyspark.used, pyspark.changed; print(pyspark.used.__cached__, pyspark.changed.value)"
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(archive)}, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{archive}/pyspark/used.pyc 1\n"
