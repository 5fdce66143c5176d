"""The reference page of all settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from backend_client.settings import BackendSettings
from dstl_service.settings_sources import known_settings
from tools import settings_page


def test_page_is_in_step_with_code() -> None:
    """docs/settings.md is the current output of `make settings-page`."""
    assert settings_page.PAGE.read_text(encoding="utf-8") == settings_page.page()


def test_page_has_every_setting() -> None:
    """Every setting of the service and every option of the backend has a row with a meaning."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in settings_page.page().splitlines()]
    meanings = {row[0].strip("`"): row[-1] for row in rows}

    for name in (*known_settings(), *BackendSettings.__dataclass_fields__):
        assert len(meanings[name]) > 10, name


def test_inherited_fields_are_documented() -> None:
    """The docstrings of inherited fields are found, and a subclass's docstring takes precedence."""

    @dataclass
    class Base:
        one: int = 1
        """The ``first``."""
        two: int = 2
        """The second."""

    @dataclass
    class Derived(Base):
        two: int = 3
        """Another
        second."""
        three: list[int] = field(default_factory=list)

    assert settings_page.attribute_docstrings(Derived) == {"one": "The `first`.", "two": "Another second."}
