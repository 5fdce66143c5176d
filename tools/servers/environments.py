"""
Environments of programs that must not share the project's: made once from pinned requirements, in the stack folder.

An environment is made again when its pins change.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from tools.servers.programs import PROJECT_ROOT, ServerError, stack_folder, stack_lock

_BUILD_REQUIREMENTS = PROJECT_ROOT / "requirements-build.txt"
_ERROR_CHARS = 2_000


def environment(name: str, requirements: Path) -> Path:
    """
    Return the folder of an environment, made if it is missing.

    Args:
        name: Of its folder; one for each file of requirements.
        requirements: Pins of all packages, with hashes.

    Raises:
        ServerError: A package cannot be installed; names the command and the end of its error.
    """
    version = hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]
    folder = stack_folder() / f"{name}-{version}"
    with stack_lock(name):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            python = str(folder / "bin" / "python")
            pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            pip += ["--require-hashes", "--no-build-isolation", "--requirement"]
            for command in (
                [sys.executable, "-m", "venv", str(folder)],
                [*pip, str(_BUILD_REQUIREMENTS)],
                [*pip, str(requirements)],
            ):
                _run(name, command)
            (folder / "complete").touch()
    return folder


def _run(name: str, command: list[str]) -> None:
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode != 0:
        raise ServerError(f"{name} could not be installed: {' '.join(command)}\n{built.stderr[-_ERROR_CHARS:]}")
