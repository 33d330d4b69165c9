"""The house rules that a program can check: doors, homes, cycles, shapes, what must not be committed, the settings.

The import layers are held by import-linter (``make check``); here is what it does not see.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tools import settings_page
from tools.settings_page import BEGIN, END, PAGES, page_table
from txmq.config import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
FUNCTION_LINES_MAX = 60
MODULE_LINES_MAX = 800
TEST_NAME_WORDS_MAX = 10
TESTS_OF_NO_MODULE = frozenset({"test_docs.py", "test_public_api.py", "test_tidy.py", "test_transcripts.py"})
PARAMETERS_MAX = 8  # aim at 5; a constructor's keyword-only options count too
# Rows of data, on hot paths, where building a value first would cost more than the work.
# And the keyword-only options of the public API, as the public API spells them.
MANY_PARAMETERS = {
    ("txmq/model.py", "__init__"), ("txmq/redo/entries.py", "run_header"),
    ("txmq/client/client.py", "producer"), ("txmq/client/client.py", "consumer"),
    ("txmq/aio/client.py", "producer"),
    ("txmq/xa/last_resource/resource.py", "__init__"),
}  # fmt: skip

# Modules that reach the outside. What decides must not: the simulation replaces clock, disk, network and randomness.
DOORS = frozenset(
    {
        "asyncio", "concurrent", "glob", "multiprocessing", "os", "pathlib", "random", "secrets", "select", "selectors",
        "shutil", "signal", "socket", "sqlite3", "ssl", "subprocess", "tempfile", "threading", "time", "uvloop",
    }
)  # fmt: skip
DOOR_CALLS = frozenset({"open", "input"})
STIFF = re.compile(
    r"(?<!lags )(?<!lag )(?<!far )(?<!is )(?<!are )(?<!years )\bbehind\b(?!:| a proxy| pgbouncer| txmq's back).{0,20}"
    r"|\b(?:is|are|was|were) to be \w+ed\b(?! is refused|` \|)", re.IGNORECASE
)  # fmt: skip
# What may use which door, and why. A directory stands for all files below it.
SHELLS: dict[str, tuple[frozenset[str], str]] = {
    "txmq/runtime/": (DOORS | DOOR_CALLS, "the doors themselves"),
    "txmq/cli/": (DOORS | DOOR_CALLS, "shells: files, processes, terminals"),
    "txmq/testing/": (DOORS | DOOR_CALLS, "shells: child processes"),
    "txmq/broker/shell/process.py": (
        frozenset({"asyncio", "pathlib", "signal", "threading", "uvloop"}),
        "the broker as a process",
    ),
    "txmq/broker/shell/cluster_membership.py": (frozenset({"threading"}), "the thread that speaks with the registry"),
    "txmq/broker/shell/tls_transport.py": (frozenset({"asyncio"}), "sockets, through the event loop"),
    "txmq/broker/shell/interbroker_connection.py": (frozenset({"asyncio"}), "sockets, through the event loop"),
    "txmq/broker/shell/reads.py": (frozenset({"concurrent"}), "reader threads"),
    "txmq/broker/shell/replica_feeds.py": (frozenset({"concurrent"}), "a reader thread"),
    "txmq/broker/shell/replica_membership.py": (
        frozenset({"asyncio", "threading"}),
        "the thread that speaks with the registry; the leader's first answer",
    ),
    "txmq/broker/shell/leader_link.py": (frozenset({"asyncio"}), "the leader's first answer"),
    "txmq/broker/shell/server.py": (frozenset({"asyncio", "concurrent"}), "sockets, through the event loop"),
    "txmq/client/bootstrap.py": (frozenset({"os"}), "the variable of a password"),
    "txmq/client/consumer/retry/retry_store.py": (frozenset({"pathlib"}), "the retry store is a local store"),
    "txmq/client/spooling/spool.py": (
        frozenset({"sqlite3", "pathlib"}),
        "the spool is a local store, with a commit of its own: ARCHITECTURE.md, Decisions",
    ),
    "txmq/xa/database/sqlite_file.py": (frozenset({"sqlite3"}), "who settles opens an application's SQLite file"),
    "txmq/spark/audit/report.py": (frozenset({"pathlib"}), "what an audit leaves are files"),
    "txmq/spark/audit/follow.py": (frozenset({"os", "pathlib"}), "how far an audit came is a file"),
    "txmq/spark/audit/rows.py": (frozenset({"sqlite3"}), "the audited table may lie in an SQLite file"),
    "txmq/broker/shell/connection.py": (frozenset({"asyncio"}), "sockets, through the event loop"),
    "txmq/aio/": (frozenset({"asyncio"}), "the client on an event loop"),
    "txmq/spark/segment_files.py": (
        frozenset({"pathlib"}),
        "the directory that a user names, before it is opened",
    ),
}

# The one home of what is somebody else's: where it is used by name, and changes with its versions.
HOMES = {
    "aiokafka": ["txmq/log/records.py"],
    "asn1crypto": ["txmq/protocol/certificates.py"],
    "cramjam": ["txmq/log/compression.py"],
    "django": ["txmq/django/"],
    "greenlet": ["txmq/runtime/strands.py"],
    "kazoo": ["txmq/registry/zookeeper/kazoo_session.py"],
    "MySQLdb": ["txmq/xa/database/mysql_server.py"],
    "pyarrow": ["txmq/spark/"],
    "pymysql": ["txmq/binlog/source/"],
    "pymysqlreplication": ["txmq/binlog/source/"],
    "pyspark": ["txmq/spark/", "txmq/testing/processes/spark.py"],
    "rich": ["txmq/cli/"],
    "scramp": ["txmq/protocol/scram.py"],
    "sqlalchemy": ["txmq/sqlalchemy/"],
    "structlog": ["txmq/runtime/logging.py"],
    "typer": ["txmq/cli/"],
    "uvloop": ["txmq/broker/shell/process.py", "txmq/testing/bench/loads.py"],
}


def _files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    """All of a file, walked once for all rules."""
    return tuple(ast.walk(_tree(path)))


PACKAGE = _files("txmq")
EVERYTHING = _files("txmq", "tests", "examples", "bench", "tools")


def _allowed_doors(name: str) -> frozenset[str]:
    allowed = [
        doors for place, (doors, _) in SHELLS.items() if name == place or (name.startswith(place) and place[-1] == "/")
    ]
    return frozenset().union(*allowed)


def _doors_used(path: Path) -> Iterator[tuple[int, str]]:
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in DOOR_CALLS:
            yield node.lineno, node.func.id


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in _nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


# A rule is one test, for all files: a test for each would be 2,000, and take longer than all other unit tests together.


def test_only_named_shells_use_the_doors_to_the_outside() -> None:
    assert [
        f"{_name(path)}:{line}: {door}"
        for path in PACKAGE
        for line, door in _doors_used(path)
        if door in (DOORS | DOOR_CALLS) - _allowed_doors(_name(path))
    ] == []


@pytest.mark.parametrize("place", [place for place in SHELLS if place.endswith(".py")])
def test_a_named_shell_uses_what_it_is_named_for(place: str) -> None:
    allowed, _why = SHELLS[place]
    assert allowed - {door for _line, door in _doors_used(ROOT / place)} == set()


def _imported(path: Path) -> Iterator[tuple[int, str]]:
    """What a module imports, wherever in it: also under TYPE_CHECKING and inside functions."""
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def test_what_is_somebody_elses_has_one_home() -> None:
    assert [
        f"{_name(path)}:{line}: {name}"
        for path in PACKAGE
        for line, name in _imported(path)
        if (homes := HOMES.get(name.partition(".")[0])) is not None
        and not any(_name(path) == home or (home[-1] == "/" and _name(path).startswith(home)) for home in homes)
    ] == []


def test_every_package_has_its_layer() -> None:
    """import-linter passes over what no layer names."""
    [layers] = [
        contract["layers"]
        for contract in tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers" and "containers" not in contract  # those are exhaustive
    ]
    named = {name.removeprefix("txmq.") for layer in layers for name in layer.split(" | ")}
    assert {_name(path).split("/")[1].removesuffix(".py") for path in PACKAGE} == named | {"__init__"}


@cache
def _lines_for_annotations(path: Path) -> set[int]:
    """Those under ``if TYPE_CHECKING``, which run nowhere."""
    blocks = [
        node for node in _nodes(path)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]  # fmt: skip
    return {line for node in blocks for line in range(node.lineno, (node.end_lineno or 0) + 1)}


def test_rooms_name_what_is_above_them_in_annotations_alone() -> None:
    """What import-linter is told to pass over (``ignore_imports``) runs nowhere."""
    found = []
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]:
        if not contract.get("ignore_imports") or contract["type"] != "layers":
            continue
        (container,) = contract["containers"]
        rank = {room: number for number, layer in enumerate(contract["layers"]) for room in re.split(r" [|:] ", layer)}
        for path in (ROOT / container.replace(".", "/")).rglob("*.py"):
            room = path.relative_to(ROOT / container.replace(".", "/")).parts[0].removesuffix(".py")
            for line, name in _imported(path):
                above = name.removeprefix(f"{container}.").partition(".")[0] if name.startswith(f"{container}.") else ""
                if rank.get(above, 99) < rank.get(room, 0) and line not in _lines_for_annotations(path):
                    found.append(f"{_name(path)}:{line}: {name}")
    assert found == []


def test_no_module_imports_itself_in_the_end() -> None:
    """The layers say so for packages; this is within them. TopologicalSorter names the modules of a cycle."""
    modules = {_name(path)[:-3].replace("/", ".").removesuffix(".__init__"): path for path in PACKAGE}
    graph = {
        module: {
            name
            for line, name in _imported(path)
            if name in modules and name != module and line not in _lines_for_annotations(path)
        }
        for module, path in modules.items()
        if path.name != "__init__.py"  # a package's names come from its modules, never the other way round
    }
    TopologicalSorter(graph).prepare()


def test_every_module_says_what_it_is_for() -> None:
    assert [_name(path) for path in PACKAGE if path.read_text("utf-8") and not ast.get_docstring(_tree(path))] == []


def test_modules_end_in_time() -> None:
    lines = {_name(path): path.read_text("utf-8").count("\n") for path in EVERYTHING}
    assert {name: count for name, count in lines.items() if count > MODULE_LINES_MAX} == {}


def test_functions_end_in_time() -> None:
    assert [
        f"{_name(path)}: {node.name}: {length} lines"
        for path in EVERYTHING
        for node in _functions(path)
        if (length := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES_MAX
    ] == []


def test_functions_take_few_parameters() -> None:
    many = []
    for path in PACKAGE:
        if "/cli/" in path.as_posix():  # commands are exempt: their parameters are the options that a person types
            continue
        for node in _functions(path):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(argument.arg not in ("self", "cls") for argument in arguments)
            if count > PARAMETERS_MAX and (_name(path), node.name) not in MANY_PARAMETERS:
                many.append(f"{_name(path)}: {node.name}: {count} parameters")
    assert many == []


def test_annotations_are_not_evaluated() -> None:
    has_some = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    assert [
        _name(path)
        for path in EVERYTHING
        if "from __future__ import annotations" not in path.read_text("utf-8")
        and any(isinstance(node, has_some) for node in _nodes(path))
    ] == []


def test_tests_neither_sleep_nor_skip() -> None:
    banned = {("time", "sleep"), ("pytest", "skip"), ("pytest", "importorskip"), ("mark", "skip"), ("mark", "skipif")}
    found = [
        f"{_name(path)}:{node.lineno}: {node.attr}"
        for path in _files("tests", "tools/crash", "tools/images", "tools/simulation")
        for node in _nodes(path)
        if isinstance(node, ast.Attribute)
        and (getattr(node.value, "id", getattr(node.value, "attr", None)), node.attr) in banned
    ]
    assert found == []


def test_prose_is_plain_english() -> None:
    """In time and order something comes after another thing, and is not in its back; what is needed must be done."""
    found = []
    for path in EVERYTHING:
        text = path.read_text("utf-8")
        found += [
            f"{_name(path)}:{token.start[0]}: {match[0]}"
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type == tokenize.COMMENT or token.string.startswith('"""')
            for match in STIFF.finditer(token.string)
        ]
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        found += [f"{_name(page)}: {match[0]}" for match in STIFF.finditer(page.read_text("utf-8"))]
    assert found == []


def test_names_of_tests_have_at_most_ten_words() -> None:
    """Subject, condition, result: a name is read in a list, and what it leaves out stands in the test."""
    assert [
        f"{_name(path)}:{node.lineno}: {node.name}"
        for path in _files("tests")
        for node in _functions(path)
        if node.name.startswith("test_") and node.name.count("_") > TEST_NAME_WORDS_MAX
    ] == []


def test_unit_tests_are_named_after_their_module() -> None:
    """tests/unit/client/test_client_bulk_and_reading.py tests txmq/client/client.py; so for bench/ and tools/."""
    assert [
        _name(path)
        for path in _files("tests/unit")
        if path.name.startswith("test_") and path.name not in TESTS_OF_NO_MODULE and not _tested_module(path)
    ] == []


def _tested_module(path: Path) -> Path | None:
    folder, words = path.relative_to(ROOT / "tests/unit").parent, path.stem.split("_")[1:]
    names = ["_".join(words[:count]) + ".py" for count in range(len(words), 0, -1)]
    places = [root / folder / name for name in names for root in (ROOT / "txmq", ROOT)]
    return next((place for place in places if place.is_file()), None)


def _committed() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    )  # fmt: skip
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


# Built from pieces, so that this file does not find itself. Homes and work trees of one machine; package indexes.
_MACHINE = re.compile("|".join([r"/" + r"home/\w+/", r"/" + r"root/", r"/" + r"work/", r"/" + r"Users/\w+/"]))
_REGISTRY = re.compile(
    "|".join([r"py" + r"pi\.", r"files\.python" + r"hosted\.", r"index" + r"-url", r"PIP_" + r"INDEX"])
)


def test_no_path_of_one_machine_and_no_registry_is_committed() -> None:
    found = []
    for path in _committed():
        text = path.read_bytes().decode("utf-8", "replace")
        for number, line in enumerate(text.splitlines(), 1):
            if _MACHINE.search(line) or _REGISTRY.search(line):
                found.append(f"{_name(path)}:{number}: {line.strip()[:100]}")
    assert found == []


@pytest.mark.parametrize("name", PAGES)
def test_the_page_of_settings_is_the_table_of_settings(name: str) -> None:
    page = (ROOT / "docs" / name).read_text("utf-8")
    between = page[page.index(BEGIN) + len(BEGIN) : page.index(END)]
    assert between.strip() == page_table(PAGES[name]).strip(), "run: .venv/bin/python -m tools.settings_page"


def test_tables_of_settings_are_written_in_place(tmp_path: Path) -> None:
    for name in PAGES:
        text = (settings_page.DOCS / name).read_text("utf-8")
        head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
        (tmp_path / name).write_text(f"{head}an older table{tail}")
    settings_page.main(tmp_path)
    for name in PAGES:
        assert (tmp_path / name).read_text("utf-8") == (settings_page.DOCS / name).read_text("utf-8")


def test_every_setting_is_used() -> None:
    """A setting that nothing reads is a promise that nobody keeps."""
    text = "\n".join(path.read_text("utf-8") for path in PACKAGE if path.name != "config.py")
    words = set(re.findall(r"\w+", text))
    through_method = {name for name in SETTINGS if name.startswith("default_") and "new_topic(" in text}
    assert set(SETTINGS) - words - through_method == set()


def test_every_relative_link_in_a_page_leads_somewhere() -> None:
    broken = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{_name(page)}: {target}")
    assert broken == []


def test_compiled_modules_call_nothing_in_the_bounds_of_a_slice() -> None:
    """mypyc 2.4 evaluates them twice. It once counted a request's bytes so; ``len`` is the same both times."""
    assert [
        f"{module}:{node.lineno}"
        for module in _compiled_modules()
        for node in _nodes(ROOT / module)
        if isinstance(node, ast.Slice)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Call) and not (isinstance(inner.func, ast.Name) and inner.func.id == "len")
    ] == []


def test_compiled_modules_have_no_keyword_default_before_other_keywords() -> None:
    """mypyc 2.4 ends with an error: ``*, limit=1, **named``."""
    assert [
        f"{module}:{node.lineno}"
        for module in _compiled_modules()
        for node in _nodes(ROOT / module)
        if isinstance(node, ast.FunctionDef) and node.args.kwarg is not None and any(node.args.kw_defaults)
    ] == []


def test_compiled_modules_set_the_causes_of_errors_by_hand() -> None:
    """mypyc 2.4 compiles ``raise ... from ...`` as if there were no ``from``."""
    found = [
        f"{module}:{raised.lineno}"
        for module in _compiled_modules()
        for raised in ast.walk(ast.parse((ROOT / module).read_text("utf-8")))
        if isinstance(raised, ast.Raise)
        and not isinstance(raised.cause, ast.Constant | None)
        and not (isinstance(raised.exc, ast.Call) and ast.unparse(raised.exc.func) == "caused")
    ]
    assert found == []


def test_no_interpreted_class_inherits_from_a_compiled_one() -> None:
    """Its first instance would be refused ("interpreted classes cannot inherit from compiled"); protocols may."""
    compiled = {name.removesuffix(".py").replace("/", ".") for name in _compiled_modules()}
    protocols = {
        (module, node.name)
        for module in compiled
        for node in _nodes(ROOT / f"{module.replace('.', '/')}.py")
        if isinstance(node, ast.ClassDef) and "Protocol" in _bases(node)
    }
    found = []
    for path in (ROOT / "txmq").rglob("*.py"):
        if _name(path) in _compiled_modules():
            continue
        imported = {
            alias.asname or alias.name: (node.module, alias.name)
            for node in _nodes(path)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        found += [
            f"{_name(path)}: {node.name}({base})"
            for node in _nodes(path)
            if isinstance(node, ast.ClassDef)
            for base in _bases(node)
            if base in imported and imported[base][0] in compiled and imported[base] not in protocols
        ]
    assert found == []


def _bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).partition("[")[0] for base in node.bases]


def _compiled_modules() -> list[str]:
    modules: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["txmq"]["compiled"]
    return modules


def test_every_file_that_a_page_names_is_there() -> None:
    """A reader follows a message by file name: ARCHITECTURE.md goes where the files go."""
    places = [f"/{_name(path)}" for path in EVERYTHING]
    named = [
        (_name(page), name)
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        for name in re.findall(r"`([\w/]+\.py)\b", page.read_text("utf-8"))
    ]
    assert len(named) > 80
    assert [(page, name) for page, name in named if not any(place.endswith(f"/{name}") for place in places)] == []
