"""The recommended settings of Spark: complete, printable, compared with an application's."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend_client.__main__ import main
from backend_client.spark.api.recommended_settings import recommended_settings

DOCS = Path(__file__).parents[4] / "docs/operations.md"


def test_settings_of_an_application_are_compared() -> None:
    """A setting is met if the application has its value; one that was not set is not."""
    given = {"spark.speculation": "TRUE", "spark.locality.wait": "3s"}

    found = {one.name: one for one in recommended_settings(given.get)}

    assert found["spark.speculation"].is_met
    assert (found["spark.locality.wait"].present, found["spark.locality.wait"].is_met) == ("3s", False)
    assert (found["spark.speculation.quantile"].present, found["spark.speculation.quantile"].is_met) == (None, False)


def test_each_setting_is_printed_and_documented(capsys: pytest.CaptureFixture[str]) -> None:
    """The command's output can be part of a command line of spark-submit; operations.md has the same values."""
    assert main(["recommended-settings"]) == 0

    captured, documented = capsys.readouterr(), DOCS.read_text(encoding="utf-8")
    words = captured.out.split()
    assert words[::2] == ["--conf"] * len(recommended_settings())
    for one in recommended_settings():
        assert f"{one.name}={one.value}" in words[1::2]
        assert f"# {one.reason}" in captured.err.splitlines()
        name = one.name.removeprefix("spark.speculation") if "speculation." in one.name else one.name
        assert any(form in documented for form in (f"`{name}={one.value}`", f"| `{name}` | `{one.value}`"))
