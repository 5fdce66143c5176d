"""
Writes docs/settings.md from the declarations of the settings: names, defaults and docstrings have one place.

With ``--check`` it writes nothing and fails if the page is out of date.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import textwrap
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from backend_client.settings import BackendSettings
from dstl_service.settings import ServiceSettings
from dstl_service.settings_sources import known_settings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
_INTRODUCTION = """\
# Settings

This page is written by `make settings-page` from the declarations in the code; a test compares it.

## Where the service's settings come from

Each source wins over those below it:

1. the command line: `--set batch.delay_ms=20`, or an option of its own where `dstl serve --help` lists one;
2. the environment: `DSTL_BATCH_DELAY_MS=20`;
3. the settings file, in TOML, named by `--config FILE` or `DSTL_CONFIG`;
4. the default.

```toml
storage = "s3://bucket/prefix"

[batch]
delay_ms = 20
```

Units are in the names.
An unknown name is refused; the error names the nearest setting.
A value of the wrong type, or one in conflict with another setting, is refused too.
In the environment, which is shared, a `DSTL_` name is refused only if it is like a known one:
of a group, without its group, or misspelt.
An auto-started sidecar has the environment of the process that starts it, `DSTL_CONFIG` included.
Settings without a default in the tables are off unless set.
"""
_NO_DEFAULT = {
    "storage": "must be given",
    "job": "must be given",
    "host_id": "from the host's name",
    "local_dir": "see there",
}


def attribute_docstrings(cls: type) -> dict[str, str]:
    """Return the docstring under each field of a class and of those that it inherits from."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not is_dataclass(base):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in zip(definition.body, definition.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                found[field.target.id] = " ".join(str(text.value.value).replace("``", "`").split())
    return found


def default_text(field: Field[Any]) -> str:
    """Return the default of a field as the page shows it."""
    if field.name in _NO_DEFAULT:
        return _NO_DEFAULT[field.name]
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"`{value}` ({value >> 20} MiB)"
    return f"`{value}`"


def service_table(cls: type, group: str) -> str:
    """Return the table of one group's settings, or with an empty `group` of those without a group."""
    documents, hints = attribute_docstrings(cls), get_type_hints(cls)
    lines = ["| setting | variable | value | default | meaning |", "|---|---|---|---|---|"]
    for field in fields(cls):
        if is_dataclass(hints[field.name]):
            continue
        setting = known_settings()[f"{group}.{field.name}" if group else field.name]
        columns = (f"`{setting.path}`", f"`{setting.variable}`", setting.kind_text, default_text(field))
        lines.append(f"| {' | '.join(columns)} | {documents[field.name]} |")
    return "\n".join(lines)


def page() -> str:
    """Return the whole page."""
    hints = get_type_hints(ServiceSettings)
    parts = [_INTRODUCTION, "## Service", service_table(ServiceSettings, "")]
    for field in fields(ServiceSettings):
        if is_dataclass(hints[field.name]):
            cls: Any = hints[field.name]
            about = (inspect.getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ").replace("``", "`")
            parts += [f"### `[{field.name}]`", about, service_table(cls, field.name)]
    documents = attribute_docstrings(BackendSettings)
    rows = [
        f"| `{field.name}` | {default_text(field)} | {documents[field.name]} |" for field in fields(BackendSettings)
    ]
    parts += [
        "## Options of `ChangelogStateBackend`",
        "Arguments of the constructor, by name.",
        "\n".join(["| option | default | meaning |", "|---|---|---|", *rows]),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description="Write docs/settings.md from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"{PAGE.name} is out of date: run `make settings-page`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
