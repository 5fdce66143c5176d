"""Jars that programs and Spark need, fetched once by Maven into the stack's folder."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from tools.servers.programs import ServerError, stack_folder, stack_lock

_PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1"
_LOG_TAIL_CHARS = 2_000


def maven_jars(name: str, *, programs: Sequence[str] = (), single: Sequence[str] = ()) -> list[Path]:
    """
    Return the paths of jars, fetched if missing.

    Args:
        name: Name of the set; another version needs another name.
        programs: Artifacts, as ``group:artifact:version``, with their dependencies.
        single: Artifacts without their dependencies.

    Raises:
        ServerError: `mvn` is not installed, or an artifact could not be fetched.
    """
    folder = stack_folder() / name
    with stack_lock(name):
        if not folder.exists():
            unfinished = stack_folder() / f"{name}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            _fetch(unfinished, programs, single)
            (unfinished / "jars").rename(folder)
            shutil.rmtree(unfinished)
    return sorted(folder.glob("*.jar"))


def _fetch(folder: Path, programs: Sequence[str], single: Sequence[str]) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        wanted = ", ".join([*programs, *single])
        raise ServerError(f"{wanted} must be fetched once, but Maven (mvn) is not on PATH; install Maven")
    folder.mkdir(parents=True)
    (folder / "pom.xml").write_text(_project(folder / "jars", programs, single), encoding="utf-8")
    goals = [f"{_PLUGIN}:copy-dependencies"] * bool(programs) + [f"{_PLUGIN}:copy"] * bool(single)
    command = [maven, "--quiet", "--batch-mode", "-Dstyle.color=never", *goals]
    fetched = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if fetched.returncode != 0:
        raise ServerError(f"Maven could not fetch {folder.name}:\n{fetched.stdout[-_LOG_TAIL_CHARS:]}")


def _project(jars: Path, programs: Sequence[str], single: Sequence[str]) -> str:
    """Return a project that makes Maven copy the dependencies and the single artifacts into a folder."""
    folder = f"<outputDirectory>{escape(str(jars))}</outputDirectory>"
    dependencies = "".join(f"<dependency>{_coordinates(artifact)}</dependency>" for artifact in programs)
    items = "".join(f"<artifactItem>{_coordinates(artifact)}</artifactItem>" for artifact in single)
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>dstl</groupId><artifactId>stack</artifactId><version>1</version><packaging>pom</packaging>"
        f"<dependencies>{dependencies}</dependencies><build><plugins><plugin>"
        "<groupId>org.apache.maven.plugins</groupId><artifactId>maven-dependency-plugin</artifactId>"
        f"<configuration><includeScope>runtime</includeScope>{folder}<artifactItems>{items}</artifactItems>"
        "</configuration></plugin></plugins></build></project>\n"
    )


def _coordinates(artifact: str) -> str:
    group, name, version = map(escape, artifact.split(":"))
    return f"<groupId>{group}</groupId><artifactId>{name}</artifactId><version>{version}</version>"
