"""
Rules of the project that no linter knows: imports between packages, docstrings, invariants, and forbidden text.

The rules are the tables at the top; the functions below only apply them.
Files are parsed, never imported, so this takes seconds and needs no optional dependency.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PACKAGES = ("storage", "dstl_service", "backend_client")
"""The installed packages."""

PROGRAMS = ("tools", "loadtest", "examples")
"""The programs that run in a checkout."""

FOLDERS = (*PACKAGES, *PROGRAMS, "tests")
"""Where the project's Python files are."""

# --- Who may import whom ---------------------------------------------------------------------------------------------

PROJECT_IMPORTS: dict[str, tuple[str, ...]] = {
    # package           what of the project it may import
    "storage": ("storage",),
    "dstl_service": ("dstl_service", "storage"),
    "backend_client": ("backend_client", "storage", "dstl_service.wire"),
    "tools": ("tools", "backend_client", "storage", "dstl_service"),
    # The chaos test compares the stored state as the library itself sees it.
    "loadtest": ("loadtest", "tools", "backend_client", "storage", "dstl_service"),
    # Code that a user could have written, and the demo's report.
    "examples": ("examples", "backend_client", "storage", "tools.reporting"),
}

LAYERS: dict[str, tuple[str, ...]] = {
    # part            its packages and single modules, bottom to top: each imports only itself and what is before it,
    #                 for types only, too; of `a` and `a.b` the longer name counts
    "dstl_service": (
        "wire",
        "process",
        "metrics",
        "access",
        "formats",
        "registry",
        "restore",
        "uploads",
        "peers",
        "links",
        "intake",
        "materialization",
        "compaction",
        "collection",
        "checkpoints",
        "repair",
        "settings",
        "settings_sources",
        "link_service",
        "restore_service",
        "composition",
        "http",
        "http.routes",
        "app",
        "commands",
        "cli",
        "entry",
        "__main__",
    ),
    "backend_client": (
        "batch_time",
        "option_checks",
        "settings",
        "progress",
        "autoscaling",
        "key_group_sql",
        "key_runs",
        "whole_numbers",
        "portions",
        "join_rules",
        "progress_line",
        "source_watermark",
        "state",
        "table",
        "service",
        "standby",
        "columnar",
        "sinks",
        "failover",
        "sources",
        "spark.private",
        "spark",
        "spark.start",
        "spark.task",
        "spark.output",
        "spark.failover",
        "spark.places",
        "spark.standby",
        "spark.scaling",
        "spark.driver",
        "spark.api",
        "testing",
        "__init__",
        "__main__",
    ),
}

WITHOUT_CIRCLES = (*PACKAGES, *PROGRAMS)
"""Where imports must form no cycle."""

MODULES_MAX = 13
"""Maximum number of modules in a folder of LAYERS and of PROGRAMS; `storage` is flat."""

LINES_MAX = 350
"""Maximum number of lines of a module that is installed or run; a longer one has more than one role."""

DOORS: dict[str, tuple[str, ...]] = {
    # third party       the only files and folders (with a slash) that may import it, or what is
    #                   below it; examples may import everything
    "boto3": ("storage/s3_session.py", "loadtest/", "tools/servers/"),
    "botocore": ("storage/s3_session.py", "storage/s3_store.py", "loadtest/", "tools/servers/"),
    "fastapi": ("dstl_service/app.py", "dstl_service/http/"),
    "starlette": ("dstl_service/app.py", "dstl_service/http/"),
    "datasketches": ("backend_client/columnar/distinct.py",),
    "rocksdict": ("backend_client/table/",),
    "confluent_kafka": (
        "backend_client/sinks/kafka/",
        "backend_client/sources/consumer_group.py",
        "loadtest/",
        "tools/servers/",
    ),
    "psycopg": (
        "backend_client/sinks/postgres/",
        "loadtest/",
        "tools/servers/",
    ),
    "deltalake": ("backend_client/sinks/delta/", "loadtest/"),
    "pyspark": (
        "backend_client/spark/",
        "backend_client/testing/",
        "loadtest/",
        "tools/servers/",
        "tools/walk/job.py",
        "tools/spark_session.py",
    ),
    # Private modules may change with any release and have one door; ruff's SLF001 checks private members.
    "pyspark.sql.pandas": ("backend_client/spark/private/",),
    "pandas.core": ("backend_client/spark/private/",),
    "py4j": ("backend_client/spark/private/", "loadtest/"),
    "gevent": ("loadtest/load/",),
    "locust": ("loadtest/load/",),
}

CLOCK_DOOR = "storage/clock.py"
CLOCK_PACKAGES = ("storage", "dstl_service")
CLOCK_MODULES = ("random", "secrets", "time", "uuid")
"""Time, randomness and unique ids reach CLOCK_PACKAGES through CLOCK_DOOR alone, so that a simulation controls them."""

# --- What no installed module may do ---------------------------------------------------------------------------------

CODE_FROM_DATA = (
    # A name of this list, or anything below it. Stored state and HTTP content are data only.
    "builtins.compile",
    "builtins.eval",
    "builtins.exec",
    "cloudpickle.load",
    "cloudpickle.loads",
    "dill",
    "jsonpickle",
    "marshal",
    "pandas.read_pickle",
    "pickle.Unpickler",
    "pickle.load",
    "pickle.loads",
    "pyspark.cloudpickle.load",
    "pyspark.cloudpickle.loads",
    "shelve",
    "yaml.full_load",
    "yaml.load",
    "yaml.unsafe_load",
)

# --- What no file of the repository may hold -------------------------------------------------------------------------

FORBIDDEN_TEXT = {
    "the host of a package registry (a mirror could not be used)": re.compile(
        r"\b(pypi\.org|pythonhosted\.org|registry\.npmjs\.org|repo1?\.maven\.(apache\.)?org|proxy\.golang\.org"
        r"|crates\.io|deb\.debian\.org|archive\.ubuntu\.com)\b"
    ),
    "a path of one machine": re.compile(r"(?<![\w.$}/-])/(?:root|work|farm|Users|home/[a-z_]\w*)/"),
}

# --- Private names that tests use ------------------------------------------------------------------------------------

PRIVATE_IN_TESTS = {
    # attribute          why a test may use it of something else than itself
    # of other projects, which have no public way
    "_blocks": "pandas: the result of our door to pandas is compared with pandas' own",
    "_get_running_loop": "asyncio: an actor of the model check is suspended inside of a loop",
    "_gateway": "Spark: a listener in Python needs its server of calls from the JVM",
    "_jsc": "Spark: executors and what they keep are known to the JVM only",
    "_jsparkSession": "Spark: listeners of a session are known to the JVM only",
    "_parse_ddl": "Spark: our parser of schemas is compared with Spark's own",
    "_set_running_loop": "asyncio: see _get_running_loop",
    "_temp_dir": "Spark: where it keeps files of shipped modules",
    # of ours: internal behaviour of a table, a store or a service shows only in its duration, or not at all
    "_client": "requests of the S3 store are counted, or answered, where boto3 sends them",
    "_encoded": "a bomb is made with our own encoder",
    "_folder": "which slot a table took",
    "_is_writable": "whether a table was opened to read only, which is its whole point",
    "_joined": "copies of rows are counted where they are made",
    "_journal": "the size of a table's journal",
    "_merge": "compactions are made without a service",
    "_objects": "all that a model's store holds is looked at before each of its calls, and a copy costs minutes",
    "_operator_infos": "the check that it is part of is left out",
    "_owned_session": "the session whose answer is lost",
    "_process": "a driver's process is killed, as by another one",
    "_remove_idle": "slots are removed while others take them, with no age",
    "_remove_if_idle": "see _remove_idle",
    "_STREAM_SINK": "the name is looked up in Spark",
    "_table": "the content of RocksDB itself",
    "_translated": "errors of boto3 that no server gives",
    "_truth": "a model is made wrong, so that the load test has something to find",
    "_write_journal": "a crash between the write of a table and of its journal",
}


# --- Which invariants a test names -----------------------------------------------------------------------------------

INVARIANTS = tuple(f"I{number}" for number in range(1, 19))

INVARIANTS_LATER: dict[str, str] = {
    # invariant   why no test can reach it yet; an entry goes when a test names the invariant
}


@cache
def repository_files() -> tuple[str, ...]:
    """Return the files that are, or would be, part of a commit, relative to the root."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return tuple(sorted(name for name in listing.split("\0") if name and (ROOT / name).is_file()))


def repository_links() -> list[str]:
    """Return the symbolic links that are part of a commit: they lead somewhere on one machine."""
    listing = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "--stage", "-z"], cwd=ROOT, check=True, capture_output=True
    ).stdout
    return [entry.decode().partition("\t")[2] for entry in listing.split(b"\0") if entry.startswith(b"120000 ")]


def python_files(*folders: str) -> list[str]:
    return [name for name in repository_files() if name.endswith(".py") and name.partition("/")[0] in folders]


@cache
def parse(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(encoding="utf-8"), filename=name)


def imports_of(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the full names of all imports, at any depth and also for types only, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports are not followed here, and ruff refuses them"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def uses_of(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the full names of everything imported or used, called or not, whatever its local name."""
    names = {"compile": "builtins.compile", "eval": "builtins.eval", "exec": "builtins.exec"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    yield from imports_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            yield ".".join([names.get(first, first), *rest]), node.lineno


def is_below(name: str, parents: tuple[str, ...]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def is_in(file: str, places: tuple[str, ...]) -> bool:
    return any(file.startswith(place) if place.endswith("/") else file == place for place in places)


def import_defects(file: str, tree: ast.Module) -> list[str]:
    """Return where the imports of one file violate PROJECT_IMPORTS, DOORS and the clock's door."""
    package = file.partition("/")[0]
    defects = []
    for name, line in imports_of(tree):
        top = name.partition(".")[0]
        if top in FOLDERS and not is_below(name, PROJECT_IMPORTS[package]):
            defects.append(f"{file}:{line}: {package} may not import {name}")
        for door, places in DOORS.items():
            if package != "examples" and is_below(name, (door,)) and not is_in(file, places):
                defects.append(f"{file}:{line}: {door} may be imported only in {', '.join(places)}")
        if package in CLOCK_PACKAGES and top in CLOCK_MODULES and file != CLOCK_DOOR:
            defects.append(f"{file}:{line}: {top} is reached only through {CLOCK_DOOR}")
    return defects


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def longest_prefix(name: str, known: Collection[str]) -> str | None:
    """Return the module or package to which an imported name belongs."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def layer_defects(file: str, tree: ast.Module) -> list[str]:
    """Return where the imports of one file violate LAYERS."""
    part = file.partition("/")[0]
    layers = [f"{part}.{name}" for name in LAYERS[part]]
    if module_of(file) == part:
        return []
    own = longest_prefix(module_of(file), layers)
    if own is None:
        return [f"{file}:1: has no place in LAYERS"]
    found = [(name, longest_prefix(name, layers), line) for name, line in imports_of(tree)]
    return [
        f"{file}:{line}: {own} is below {layer} and may not import {name}"
        for name, layer, line in found
        if layer is not None and layers.index(layer) > layers.index(own)
    ]


def circle_of(trees: Mapping[str, ast.Module]) -> list[str]:
    """Return modules of which each imports the next one and the last the first; empty if there are none."""
    modules = {module_of(file) for file in trees}
    graph: dict[str, set[str]] = {}
    for file, tree in trees.items():
        imported = {longest_prefix(name, modules) for name, _ in imports_of(tree)}
        graph[module_of(file)] = {name for name in imported if name is not None} - {module_of(file)}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))  # it lists them from the imported to the importing module
    return []


def code_from_data_defects(file: str, tree: ast.Module) -> list[str]:
    """Return where one file uses functions that turn data into code."""
    return [f"{file}:{line}: uses {name}" for name, line in uses_of(tree) if is_below(name, CODE_FROM_DATA)]


def functions_of_tests() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for file in python_files("tests"):
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield file, node


def report(defects: list[str]) -> None:
    assert not defects, "\n" + "\n".join(sorted(set(defects)))


def test_imports_keep_to_tables() -> None:
    """Packages import only what the tables at the top allow, and never the tests."""
    report([defect for file in python_files(*PROJECT_IMPORTS) for defect in import_defects(file, parse(file))])


def test_tables_name_existing_packages() -> None:
    """Every installed package has a row in the table of imports, and no package may import the tests."""
    assert {*PACKAGES, *PROGRAMS} == set(PROJECT_IMPORTS)
    assert not any(is_below("tests", allowed) for allowed in PROJECT_IMPORTS.values())


@pytest.mark.parametrize(
    ("file", "source", "defect"),
    [
        ("storage/a.py", "from dstl_service.wire import X", "storage may not import dstl_service.wire.X"),
        ("storage/a.py", "import tests.support", "storage may not import tests.support"),
        ("storage/a.py", "def f():\n    import boto3", "boto3 may be imported only"),
        ("storage/s3_session.py", "import boto3", ""),
        ("dstl_service/a.py", "from time import monotonic", "time is reached only through storage/clock.py"),
        ("dstl_service/restore/plan.py", "from fastapi import Response", "fastapi may be imported only"),
        ("dstl_service/http/routes/restore.py", "from fastapi import Response", ""),
        ("backend_client/a.py", "import time", ""),
        ("backend_client/a.py", "from dstl_service import wire", ""),
        ("backend_client/a.py", "from dstl_service import wire, settings", "may not import dstl_service.settings"),
        ("backend_client/a.py", "from dstl_service.wire import X", ""),
        ("backend_client/a.py", "from pyspark.sql import Row", "pyspark may be imported only"),
        ("backend_client/spark/a.py", "from pyspark.sql import Row", ""),
        ("backend_client/spark/a.py", "from pyspark.sql.pandas import types", "may be imported only in"),
        ("backend_client/spark/a.py", "from pandas.core.internals import blocks", "may be imported only in"),
        ("backend_client/spark/private/a.py", "from pyspark.sql.pandas.types import to_arrow_type", ""),
        ("examples/a.py", "from pyspark.sql import Row", ""),
        ("examples/a.py", "from tools.reporting.figures import Figure", ""),
        ("examples/a.py", "from tools.servers.kafka import KafkaBroker", "may not import tools.servers"),
        ("tools/a.py", "from loadtest.load import driver", "tools may not import loadtest"),
        ("tools/a.py", "import boto3", "boto3 may be imported only"),
    ],
)
def test_import_rule_finds_defect(file: str, source: str, defect: str) -> None:
    """The rule about imports finds what the tables forbid, and only that."""
    found = import_defects(file, ast.parse(source))

    assert [defect in text for text in found] == ([True] if defect else [])


def test_layers_import_only_what_is_below() -> None:
    """Within a part, packages have an order, and each imports only from those below it."""
    report([defect for file in python_files(*LAYERS) for defect in layer_defects(file, parse(file))])


@pytest.mark.parametrize(
    ("file", "source", "defect"),
    [
        ("registry/a.py", "from dstl_service.formats.keys import Place", ""),
        ("registry/a.py", "from dstl_service.registry.b import B", ""),
        ("formats/a.py", "from dstl_service.registry import lives", "formats is below dstl_service.registry"),
        ("formats/a.py", "if TYPE_CHECKING:\n    from dstl_service.app import create_app", "is below dstl_service.app"),
        ("http/routes/a.py", "from dstl_service.http.errors import install", ""),
        ("http/a.py", "from dstl_service.http.routes import jobs", "http is below dstl_service.http.routes"),
        ("composition.py", "from dstl_service import __version__", ""),
        ("unheard_of/a.py", "import json", "has no place in LAYERS"),
    ],
)
def test_layer_rule_finds_defect(file: str, source: str, defect: str) -> None:
    """The rule about layers finds imports that lead up, and only those."""
    found = layer_defects(f"dstl_service/{file}", ast.parse(source))

    assert [defect in text for text in found] == ([True] if defect else [])


def test_layers_name_existing_modules() -> None:
    """Every name in the table of layers is a folder or a module."""
    paths = [ROOT / part / name.replace(".", "/") for part, names in LAYERS.items() for name in names]

    assert [path for path in paths if not (path.is_dir() or path.with_suffix(".py").is_file())] == []


def test_no_module_leads_back_to_itself() -> None:
    """Imports form no cycle, including those for types only."""
    assert circle_of({file: parse(file) for file in python_files(*WITHOUT_CIRCLES)}) == []


def test_circle_is_found() -> None:
    """The rule about cycles follows packages, modules and names, and reports the modules of the cycle."""
    sources = {
        "storage/__init__.py": "",
        "storage/a.py": "from storage.b import B",
        "storage/b.py": "def f():\n    from storage import c",
        "storage/c.py": "import storage.a",
        "storage/d.py": "import storage.a",
    }
    trees = {file: ast.parse(source) for file, source in sources.items()}

    assert {*circle_of(trees)} == {"storage.a", "storage.b", "storage.c"}
    assert circle_of({**trees, "storage/c.py": ast.parse("from storage import X")}) == []


def test_folders_are_small() -> None:
    """A folder has few enough modules to survey at a glance."""
    folders = Counter(
        file.rpartition("/")[0] for file in python_files(*LAYERS, *PROGRAMS) if not file.endswith("/__init__.py")
    )

    assert {folder: count for folder, count in folders.items() if count > MODULES_MAX} == {}


def test_modules_are_short() -> None:
    """A module has one role, for which LINES_MAX is enough."""
    lines = {file: (ROOT / file).read_text("utf-8").count("\n") for file in python_files(*PACKAGES, *PROGRAMS)}

    report(
        [f"{file}:1: has {count} lines, more than {LINES_MAX}" for file, count in lines.items() if count > LINES_MAX]
    )


def test_packages_run_no_code_from_data() -> None:
    """No installed module unpickles, evaluates or loads code from data (I15)."""
    report(
        [defect for file in python_files(*PACKAGES, "loadtest") for defect in code_from_data_defects(file, parse(file))]
    )


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(b'')",
        "import pickle as p\nlist(map(p.loads, []))",
        "from pickle import Unpickler as U",
        "from marshal import loads",
        "import pyspark.cloudpickle\npyspark.cloudpickle.loads(b'')",
        "from pyspark import cloudpickle\ncloudpickle.loads(b'')",
        "eval('1')",
        "import builtins\nbuiltins.exec('1')",
        "import yaml\nyaml.load('')",
    ],
)
def test_code_from_data_is_found(source: str) -> None:
    """The rule about code from data finds every way of naming it (I15)."""
    assert code_from_data_defects("storage/a.py", ast.parse(source))


def test_harmless_names_are_not_code_from_data() -> None:
    """Reading JSON or safe YAML, a compiled pattern and a method called eval do not turn data into code (I15)."""
    source = "import json, re, yaml\njson.loads('1')\nre.compile('a')\nyaml.safe_load('')\nself.eval()"

    assert not code_from_data_defects("storage/a.py", ast.parse(source))


def test_modules_have_docstrings() -> None:
    """Every module says what it owns; only an empty `__init__.py` has no docstring."""
    report(
        [
            f"{file}:1: has no module docstring"
            for file in python_files(*FOLDERS)
            if ast.get_docstring(parse(file)) is None and (parse(file).body or not file.endswith("__init__.py"))
        ]
    )


def test_tests_have_docstrings() -> None:
    """Every test states its expectation in a sentence."""
    report(
        [
            f"{file}:{function.lineno}: {function.name} has no docstring"
            for file, function in functions_of_tests()
            if ast.get_docstring(function) is None
        ]
    )


def test_repository_holds_no_local_names() -> None:
    """No file names a registry's host or a path of one machine, and no link leads to one."""
    defects = [f"{link}: a symbolic link" for link in repository_links()]
    for file in repository_files():
        try:
            lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(lines, start=1):
            defects += [f"{file}:{number}: {what}" for what, text in FORBIDDEN_TEXT.items() if text.search(line)]
    report(defects)


def private_uses(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the private attributes that a module uses of anything else than `self`, `cls` and `super()`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "super()"):
                yield node.attr, node.lineno


def test_tests_use_nothing_private() -> None:
    """A test uses only public names; exceptions are in the table, with the reason."""
    uses = [(file, name, line) for file in python_files("tests") for name, line in private_uses(parse(file))]

    report([f"{file}:{line}: uses {name}" for file, name, line in uses if name not in PRIVATE_IN_TESTS])
    report([f"{name} is used by no test any more" for name in {*PRIVATE_IN_TESTS} - {name for _, name, _ in uses}])


def test_private_use_is_found() -> None:
    """The rule finds private attributes of others, at any depth, and allows those of the class itself."""
    source = "self._a\ncls._b\nsuper()._c\nself.d._e\nf()._g\nh.__class__\ni._j = 1"

    assert sorted(name for name, _ in private_uses(ast.parse(source))) == ["_e", "_g", "_j"]


STATUS_CHOICES = re.compile(r"status\w* in \(\d{3}, *\d{3}")


def test_answers_are_told_apart() -> None:
    """A test knows which status it expects: if it allows two, one is wrong."""
    report(
        [
            f"{file}:{number}: expects one status or another"
            for file in python_files("tests")
            for number, line in enumerate((ROOT / file).read_text(encoding="utf-8").splitlines(), 1)
            if STATUS_CHOICES.search(line)
        ]
    )


def test_invariants_are_named_by_tests() -> None:
    """The docstring of a test names every invariant that the code can already violate."""
    nodes = [node for file in python_files("tests") for node in ast.walk(parse(file))]
    documented = [node for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
    docstrings = [ast.get_docstring(node) or "" for node in documented if node.name.lower().startswith("test")]
    named = set(re.findall(r"\bI\d+\b", " ".join(docstrings)))

    report([f"{name} is named by no test" for name in {*INVARIANTS} - named - {*INVARIANTS_LATER}])
    report([f"{name} is named by a test: take it out of INVARIANTS_LATER" for name in named & {*INVARIANTS_LATER}])
    report([f"{name} is no invariant" for name in (named | {*INVARIANTS_LATER}) - {*INVARIANTS}])
