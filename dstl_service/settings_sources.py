"""
Sources of settings, by precedence: the command line, the environment, the settings file, defaults.

| source       | `delay_ms` of the group `batch` is called | a value is                      |
|--------------|-------------------------------------------|---------------------------------|
| command line | ``--set batch.delay_ms=20``               | text                            |
| environment  | ``DSTL_BATCH_DELAY_MS``                   | text                            |
| file (TOML)  | ``delay_ms`` in the table ``[batch]``     | of the setting's own type       |

An unknown name is refused, and the error names the nearest setting. Only in the environment, which other programs
share, an unknown name is ignored unless it begins like a group, lacks only the group, or is close to a known name.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dstl_service.settings import ServiceSettings
from storage.errors import InvalidInputError

PREFIX = "DSTL_"
CONFIG_VARIABLE = "DSTL_CONFIG"
_OLD_VARIABLES = {"DSTL_IN_FLIGHT_BYTES_MAX": "batch.in_flight_bytes_max"}
# Variables of the backend, and those that Kubernetes sets in every container for services named dstl-….
_FOREIGN_VARIABLES = re.compile(
    r"DSTL_CONFIG|DSTL_SERVICE|DSTL_LOCAL_DIR|DSTL_CA_FILE|DSTL_CLIENT_CERTIFICATE_FILE"
    r"|DSTL_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)
# Names of the backend, and of the settings file, which may be misspelt, too.
_BACKEND_NAMES = ("CONFIG", "SERVICE", "LOCAL_DIR", "CA_FILE", "CLIENT_CERTIFICATE_FILE")
_SIMILARITY_MIN = 0.8  # one or two typing errors
_KUBERNETES_PORT = re.compile(r"(tcp|udp|sctp)://")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: `group` is empty for fields of `ServiceSettings`; `kind` is the type without ``| None``."""

    group: str
    name: str
    kind: Any
    is_optional: bool
    default: Any
    is_secret: bool

    @property
    def path(self) -> str:
        """Its name in settings files and on the command line."""
        return f"{self.group}.{self.name}" if self.group else self.name

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return PREFIX + self.path.replace(".", "_").upper()

    def parse(self, text: str, source: str) -> Any:
        """Parse a value's text form; `InvalidInputError` if it is invalid."""
        if self.is_optional and not text:
            return None
        try:
            if get_origin(self.kind) is Literal:
                return {choice: choice for choice in get_args(self.kind)}[text]
            return _PARSERS.get(self.kind, str)(text)
        except (ValueError, KeyError):
            raise self._refused(text, source) from None

    def check(self, value: Any, source: str) -> Any:
        """Return a value from a settings file; `InvalidInputError` if its type is wrong."""
        if self.kind is float and type(value) in (int, float) and math.isfinite(value):
            return float(value)
        if self.kind in (int, bool) and type(value) is self.kind:
            return value
        if self.kind not in (int, bool, float) and isinstance(value, str):
            return self.parse(value, source)
        raise self._refused(value, source)

    @property
    def kind_text(self) -> str:
        """The type of a value, in words."""
        if get_origin(self.kind) is Literal:
            return "one of " + ", ".join(get_args(self.kind))
        return {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}.get(self.kind, "text")

    def _refused(self, value: Any, source: str) -> InvalidInputError:
        given = "something else" if self.is_secret else repr(value)
        return InvalidInputError(f"{source} must be {self.kind_text}, it is {given}")


def _boolean(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.lower()]


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    return number


_PARSERS: Mapping[Any, Callable[[str], Any]] = {
    int: int,
    float: _finite,
    bool: _boolean,
    Path: lambda text: Path(text).expanduser(),
}


@cache
def known_settings() -> Mapping[str, Setting]:
    """Return every setting by its path, in the order of declaration."""
    return {setting.path: setting for setting in _settings_of(ServiceSettings, "")}


def _settings_of(cls: type, group: str) -> Iterator[Setting]:
    hints = get_type_hints(cls)
    for item in fields(cls):
        hint = hints[item.name]
        if is_dataclass(hint):
            yield from _settings_of(hint, item.name)  # type: ignore[arg-type]  # a class, as the field's type is one
            continue
        is_optional = get_origin(hint) in (Union, types.UnionType)
        kind = next(part for part in get_args(hint) if part is not type(None)) if is_optional else hint
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        yield Setting(group, item.name, kind, is_optional, default, not item.repr)


def load_settings(
    command_line: Mapping[str, str | None],
    environment: Mapping[str, str] | None = None,
    config_path: str | None = None,
) -> ServiceSettings:
    """
    Build the settings from all sources.

    Args:
        command_line: Text by path, such as ``batch.delay_ms``; None if not given.
        environment: Environment variables; by default those of the process.
        config_path: The settings file; by default the one that ``DSTL_CONFIG`` names.

    Raises:
        InvalidInputError: A name is unknown, a value has the wrong type, or values contradict each other.
    """
    environment = os.environ if environment is None else environment
    config_path = config_path or environment.get(CONFIG_VARIABLE) or None
    values = {
        **(read_file(config_path) if config_path else {}),
        **read_environment(environment),
        **read_command_line(command_line),
    }
    if not values.get("storage"):
        raise InvalidInputError("no storage is set; give --storage, DSTL_STORAGE, or storage in the settings file")
    grouped: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        setting = known_settings()[path]
        grouped.setdefault(setting.group, {})[setting.name] = value
    top = grouped.pop("", {})
    classes = get_type_hints(ServiceSettings)
    return ServiceSettings(**top, **{group: classes[group](**given) for group, given in grouped.items()})


def read_file(path: str) -> dict[str, Any]:
    """Return the settings of a file, by path; `InvalidInputError` if it is unreadable or invalid."""
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise InvalidInputError(f"settings file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidInputError(f"settings file {path} is not valid TOML: {error}") from error
    values: dict[str, Any] = {}
    for name, value in document.items():
        for path_in_file, inner in (
            {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        ).items():
            values[path_in_file] = _known(path_in_file, path).check(inner, f"{path_in_file} in {path}")
    return values


def read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of the environment, by path; `InvalidInputError` for an unknown name or a wrong value."""
    settings = {setting.variable: setting for setting in known_settings().values()}
    settings |= {variable: known_settings()[path] for variable, path in _OLD_VARIABLES.items()}
    groups = tuple(f"{PREFIX}{setting.group.upper()}_" for setting in known_settings().values() if setting.group)
    values = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX):
            continue
        setting = settings.get(variable)
        if setting is None:
            is_in_group = variable.startswith(groups)
            near = _nearest(variable.removeprefix(PREFIX), settings, 0.5 if is_in_group else _SIMILARITY_MIN)
            if not _FOREIGN_VARIABLES.fullmatch(variable) and (is_in_group or near):
                hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
                raise InvalidInputError(f"environment variable {variable} is not a setting{hint}")
        elif not (setting.kind is int and _KUBERNETES_PORT.match(text)):
            values[setting.path] = setting.parse(text, variable)
    return values


def _nearest(name: str, settings: Mapping[str, Setting], likeness_min: float) -> list[str]:
    """Return the name that was meant, if there is one; both without the prefix."""
    if name.startswith(("CONFIG_", "CONF_")):
        return [CONFIG_VARIABLE.removeprefix(PREFIX)]
    for known, setting in settings.items():
        if setting.group and setting.name.upper() == name:
            return [known.removeprefix(PREFIX)]
    names = [known.removeprefix(PREFIX) for known in settings]
    return difflib.get_close_matches(name, [*names, *_BACKEND_NAMES], 1, likeness_min)


def read_command_line(command_line: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the settings of the command line, by path; `InvalidInputError` for an unknown name or a wrong value."""
    return {
        path: _known(path, "the command line").parse(text, path)
        for path, text in command_line.items()
        if text is not None
    }


def _known(path: str, source: str) -> Setting:
    setting = known_settings().get(path)
    if setting is None:
        near = difflib.get_close_matches(path, known_settings(), 1, 0.0)
        raise InvalidInputError(f"{path!r} in {source} is not a setting; the nearest is {near[0]!r}")
    return setting
