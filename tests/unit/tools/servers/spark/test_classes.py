"""Java's options for the JVMs of tests: one that has other classes silently starts as without the archive."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tools.servers.spark.classes import options_of_short_jvms


@pytest.mark.parametrize("content", [None, b"", b"an archive of another Java"])
def test_archive_that_does_not_fit_is_ignored(tmp_path: Path, content: bytes | None) -> None:
    """A server's JVM prints nothing that a test could take for the server's output."""
    if content is not None:
        (tmp_path / "classes").write_bytes(content)
    environment = {**os.environ, "JAVA_TOOL_OPTIONS": options_of_short_jvms(tmp_path / "classes")}

    done = subprocess.run(["java", "--version"], env=environment, capture_output=True, text=True, check=True)

    assert done.stdout
    assert "cds" not in done.stdout
    assert done.stderr.splitlines() == [f"Picked up JAVA_TOOL_OPTIONS: {environment['JAVA_TOOL_OPTIONS']}"]


def test_options_without_an_archive() -> None:
    """Nothing names an archive where there is none."""
    assert "Archive" not in options_of_short_jvms(None)
