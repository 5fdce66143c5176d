"""
The documents name only what exists: links, files, `make` targets, commands of `dstl`, settings and metrics.

Documents are read as text; commands are run with --help.
"""

from __future__ import annotations

import io
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout, suppress
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

from backend_client.service.launcher import AutoStartedSidecar
from dstl_service import cli

ROOT = Path(__file__).resolve().parent.parent

GENERATED = ("docs/settings.md", "docs/metrics.md")
"""Generated from the code; tests of `tools` compare them. Other documents may name only what these contain."""

MADE_BY_USERS = ("compose/dev.token",)
"""Files that a document tells its reader to create."""

_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^ *```[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_MEMBER = re.compile(r"`([\w/]+\.py)` \(`(\w+)`")
_MAKE = re.compile(r"\bmake ([a-z][a-z0-9-]*)")
_DSTL = re.compile(r"\bdstl (?:\[[^\]]*\] )*([a-z]+)((?:[^\n\\]|\\\n)*)")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_VARIABLE = re.compile(r"\bDSTL_[A-Z0-9_]+\b")
_METRIC = re.compile(r"\bdstl_[a-z_]+\b")
_SETTING = re.compile(r"[a-z_][a-z_0-9]*\.[a-z_0-9]+")


@cache
def tracked_files() -> frozenset[str]:
    """Return the files that are, or would be, part of a commit, relative to the root."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return frozenset(name for name in listing.split("\0") if name and (ROOT / name).is_file())


@cache
def folders() -> frozenset[str]:
    return frozenset(str(parent) for name in tracked_files() for parent in Path(name).parents if str(parent) != ".")


def documents() -> list[str]:
    return sorted(name for name in tracked_files() if name.endswith(".md"))


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def spans_of(text: str) -> list[str]:
    """Return the text in backticks."""
    return _SPAN.findall(_FENCE.sub("", text))


def code_of(text: str) -> list[str]:
    """Return the text in backticks, and the lines of code blocks joined with their continuations."""
    blocks = "\n".join(_BLOCK.findall(text)).replace("\\\n", " ")
    return [*spans_of(text), *blocks.splitlines()]


def anchors_of(text: str) -> set[str]:
    """Return the anchors of a document's headings, as code hosts generate them."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(_FENCE.sub("", text)))
    return {heading.replace(" ", "-") for heading in plain}


def link_defects(name: str, text: str) -> Iterator[str]:
    for link in _LINK.findall(_FENCE.sub("", text)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (ROOT / name).parent.joinpath(file).resolve() if file else ROOT / name
        if not target.exists():
            yield f"{name}: link to {link}: there is no such file"
        elif anchor and anchor not in anchors_of(target.read_text(encoding="utf-8")):
            yield f"{name}: link to {link}: there is no such heading"


def path_defects(name: str, text: str) -> Iterator[str]:
    """Find paths of the repository: text that begins with one of its folders, or ends like a file and has a slash."""
    top = {file.partition("/")[0] for file in tracked_files() if "/" in file}
    for span in spans_of(text):
        path = span.partition("::")[0].rstrip("/")
        if not re.fullmatch(r"[\w.*-]+(/[\w.*-]+)+", path) and f"{path}/" != span:
            continue
        if path.partition("/")[0] not in top or span in MADE_BY_USERS:
            continue
        if not any(fnmatchcase(file, path) for file in tracked_files() | folders()):
            yield f"{name}: `{span}`: there is no such file or folder"


def module_defects(name: str, text: str) -> Iterator[str]:
    """Find modules without their part, such as `registry/takeover`, and names that a file is said to contain."""
    top = {file.partition("/")[0] for file in tracked_files() if "/" in file}
    for span in spans_of(text) if name == "DESIGN.md" else ():
        files = [f"{part}/{span}.py" for part in ("storage", "dstl_service", "backend_client")]
        is_module = re.fullmatch(r"[a-z_]+(/[a-z_]+)+", span) is not None and span.partition("/")[0] not in top
        if is_module and tracked_files().isdisjoint(files):
            yield f"{name}: `{span}`: there is no such module"
    for file, member in _MEMBER.findall(text):
        if file in tracked_files() and not re.search(
            rf"^ *(async )?(def|class) {member}\b", text_of(file), re.MULTILINE
        ):
            yield f"{name}: `{file}` has no `{member}`"


def make_defects(name: str, text: str) -> Iterator[str]:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", text_of("Makefile"), re.MULTILINE))
    for code in code_of(text):
        for target in _MAKE.findall(code):
            if target not in targets:
                yield f"{name}: `make {target}`: there is no such target"


@cache
def commands() -> Mapping[str, frozenset[str]]:
    """Return the subcommands of ``dstl`` with their options, from its help."""
    return {name: frozenset(_OPTION.findall(help_of(name))) for name in subcommands()}


def subcommands() -> list[str]:
    return re.findall(r"^    ([a-z]+)(?:  |$)", help_of(), re.MULTILINE)


def help_of(*arguments: str) -> str:
    said = io.StringIO()
    with redirect_stdout(said), suppress(SystemExit):
        cli.main([*arguments, "--help"])
    return said.getvalue()


def command_defects(name: str, text: str) -> Iterator[str]:
    for code in code_of(text):
        for command, rest in _DSTL.findall(code):
            if command not in commands():
                yield f"{name}: `dstl {command}`: there is no such command"
                continue
            for option in _OPTION.findall(rest):
                if option not in commands()[command]:
                    yield f"{name}: `dstl {command} {option}`: there is no such option"


def setting_defects(name: str, text: str) -> Iterator[str]:
    known = set(spans_of(text_of("docs/settings.md")))
    groups = {setting.partition(".")[0] for setting in known if _SETTING.fullmatch(setting)} - {"0"}  # a default
    for span in spans_of(text):
        if _SETTING.fullmatch(span) and span.partition(".")[0] in groups and span not in known:
            yield f"{name}: `{span}`: there is no such setting"


def metric_defects(name: str, text: str) -> Iterator[str]:
    known = set(spans_of(text_of("docs/metrics.md"))) | {"dstl_service"}
    for span in spans_of(text):
        for metric in _METRIC.findall(span):
            whole = span == metric or span.startswith(f"{metric}{{")
            if whole and metric not in known and not metric.endswith("_"):
                yield f"{name}: `{metric}`: there is no such metric"


@cache
def variables() -> frozenset[str]:
    """Return the environment variables that are settings, or that some code or container reads."""
    sources = [name for name in tracked_files() if name.endswith((".py", ".yaml", "Makefile", "Dockerfile"))]
    code = (text_of(name) for name in sources if name != "tests/test_docs.py")
    pages = (text_of(name) for name in GENERATED)
    return frozenset(variable for text in (*code, *pages) for variable in _VARIABLE.findall(text))


def variable_defects(name: str, text: str) -> Iterator[str]:
    for variable in _VARIABLE.findall(text):
        if variable not in variables() and not variable.endswith("_"):
            yield f"{name}: {variable}: no code reads it"


RULES: tuple[Callable[[str, str], Iterator[str]], ...] = (
    link_defects,
    path_defects,
    module_defects,
    make_defects,
    command_defects,
    setting_defects,
    metric_defects,
    variable_defects,
)


@pytest.mark.parametrize("rule", RULES)
def test_documents_name_what_exists(rule: Callable[[str, str], Iterator[str]]) -> None:
    """Each link, path, target, command, setting, metric and variable in a document exists."""
    defects = [defect for name in documents() for defect in rule(name, text_of(name))]

    assert not defects, "\n" + "\n".join(sorted(set(defects)))


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (link_defects, "see [there](docs/nowhere.md)"),
        (link_defects, "see [there](docs/glossary.md#nothing)"),
        (path_defects, "see `storage/nowhere.py`"),
        (path_defects, "see `tests/unit/nowhere/`"),
        (module_defects, "see `storage/model.py` (`nothing`)"),
        (make_defects, "`make nothing`"),
        (make_defects, "```\nmake nothing ONLY=1\n```"),
        (command_defects, "`dstl nothing --storage URL`"),
        (command_defects, "```\ndstl gc --storage URL \\\n  --nothing JOB\n```"),
        (setting_defects, "`retention.nothing`"),
        (metric_defects, "`dstl_nothing_total`"),
        (variable_defects, "`DSTL_NOTHING`"),
    ],
)
def test_rule_finds_defect(rule: Callable[[str, str], Iterator[str]], text: str) -> None:
    """Each rule finds missing names."""
    assert len(list(rule("README.md", text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "see [there](docs/glossary.md) and [here](#read-on) and [elsewhere](https://example.org/nowhere)",
        "`storage/`, `storage/model.py`, `tests/unit/*/test_settings.py`, `/metrics`, `segments/<host>/x.seg`",
        "`make test WORKERS=1`, `dstl gc --storage URL JOB --delete`, `retention.checkpoints_max`",
        "`dstl_batches_total`, `dstl_batch_…`, `DSTL_STORAGE`",
    ],
)
def test_rules_accept_what_exists(text: str) -> None:
    """No rule reports an existing name, or a name outside this project."""
    assert [defect for rule in RULES for defect in rule("README.md", text)] == []


def test_nobody_is_told_to_install_a_package_of_others() -> None:
    """The package index has another project under this one's name, so no text and no error asks for it there."""
    texts = [name for name in tracked_files() - {"tests/test_docs.py"} if name.endswith((".md", ".py", ".toml"))]
    asked = re.compile(r"pip install[^`\n]*[\"' ]dstl\b(?!-)")
    found = [f"{name}: {match}" for name in texts for match in asked.findall(text_of(name))]

    assert found == ["README.md: pip install dstl"]  # what never to do


def test_nobody_is_told_to_kill_by_an_old_process_id() -> None:
    """A file with a process id outlives the process, and its number is given to others."""
    found = [name for name in documents() if re.search(r"kill[^`\n]*\$\(cat [^`\n]*\.pid", text_of(name))]

    assert found == []


def test_auto_started_sidecars_are_ended_as_documented() -> None:
    """The pattern by which an upgrade ends them is that of the command line that starts them."""
    pattern = re.search(r"pkill -u [^`]* -f '([^']+)'", text_of("docs/operations.md"))
    assert pattern is not None
    sidecar = AutoStartedSidecar("file:///state", "/tmp/dstl-0", 600)

    assert re.search(pattern[1], " ".join(sidecar.command()))
    assert not re.search(pattern[1], "python -m dstl_service serve --storage file:///state --socket /run/dstl.sock")


def test_every_decision_is_in_the_index() -> None:
    """The index of decisions lists each record once, under its own title."""
    rows = re.findall(r"^\| \[(\d{4})\]\((\S+)\) \| (.+) \|$", text_of("docs/decisions/README.md"), re.MULTILINE)
    records = [name for name in documents() if re.fullmatch(r"docs/decisions/\d{4}-.+\.md", name)]

    assert [f"docs/decisions/{file}" for _, file, _ in rows] == records
    assert [f"# {number}: {title}" for number, _, title in rows] == [text_of(name).splitlines()[0] for name in records]
