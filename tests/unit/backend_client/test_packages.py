"""The import errors for a module that is missing or hidden by another one."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from backend_client.sinks.packages import needed_for

ROOT = Path(__file__).resolve().parents[3]


def test_missing_package_of_a_sink_is_named() -> None:
    """A sink without its package says what to install, and where."""
    with (
        pytest.raises(ModuleNotFoundError, match=r"KafkaSink needs .*every executor host: pip install 'confluent"),
        needed_for("KafkaSink", "no_such_module", "confluent-kafka>=2.10"),
    ):
        importlib.import_module("no_such_module")


def test_other_missing_module_is_told_as_it_is() -> None:
    """A module that is missing for another reason is not explained by the sink's package."""
    with (
        pytest.raises(ModuleNotFoundError, match=r"^No module named 'no_such_module'"),
        needed_for("KafkaSink", "confluent_kafka", "confluent-kafka>=2.10"),
    ):
        importlib.import_module("no_such_module")


def test_module_of_the_user_that_hides_storage_is_named(tmp_path: Path) -> None:
    """A `storage.py` beside a user's program is named, instead of a missing module within it."""
    (tmp_path / "storage.py").touch()
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", "from backend_client import ChangelogStateBackend"],
        cwd="/",
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )

    assert f"{tmp_path / 'storage.py'}, hides the package storage" in done.stderr


@pytest.mark.parametrize(
    "program", ["from backend_client import ChangelogStateBackend", "from dstl_service.entry import main; main()"]
)
def test_installation_without_extras_is_explained(program: str) -> None:
    """Where the extras are missing, client and command say how to install them."""
    hide = "import sys; sys.modules.update(pyspark=None, prometheus_client=None); "
    done = subprocess.run([sys.executable, "-c", hide + program], cwd=ROOT, capture_output=True, text=True, check=False)

    assert "is missing: this project was installed without its extras" in done.stderr
    assert "FILE.whl[service,spark]" in done.stderr
