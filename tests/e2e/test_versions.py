"""The older supported minor versions of Spark: one query and every private interface on each."""

from __future__ import annotations

import pytest

from tools.test_versions import SHORT, declared, environments, run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_versions_are_declared() -> None:
    """The package allows the pinned version and those with their own requirements."""
    assert declared() == ["4.1", "4.2"]


@pytest.mark.parametrize("version", declared())
def test_version_passes(version: str) -> None:
    """A query with the Row API and the pandas API, and all private interfaces of Spark, work on the version."""
    python = environments().get(version)
    if python is None:
        pytest.skip(f"no environment with PySpark {version}: run make versions")

    outcome = run(version, python, SHORT, quiet=True)

    assert (outcome.exit_code, outcome.failed) == (0, 0), outcome.output[-20_000:]
    assert outcome.passed > 20
