"""``make house``: the size of each room beside its budget, and what makes it hard to find one's way in.

The report has the rooms of txmq/ with lines and files, the modules with one importer, Protocols that one module alone
names, and the longest chain of imports. Below it stand prose that cites what is not there, which is an error, and the
hands that a call passes on the client's side (``tools/traces.py``).

``--rev REV`` measures another commit, for a comparison.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CODE = ("txmq", "pyspark_txmq", "tests", "tools", "examples", "bench")
ROOMS = {  # packages, lines that are wanted
    "values, runtime, protocol, redo, log, registry": (("", "runtime", "protocol", "redo", "log", "registry"), 12_500),
    "broker": (("broker",), 14_000),
    "client, aio": (("client", "aio"), 16_000),
    "xa": (("xa",), 6_300),
    "outbox, django, sqlalchemy": (("outbox", "django", "sqlalchemy"), None),
    "binlog": (("binlog",), 7_500),
    "spark": (("spark",), 6_000),
    "cli": (("cli",), 4_300),
    "testing": (("testing",), 2_000),
}
TOTALS = {"txmq": (75_000, 380), "tests": (70_000, None), "tools": (16_000, None)}  # lines, files
CHAIN_MAX = 28
CITED = re.compile(r"(?<![\w/*<.-])((?:[\w-]+/)*[\w-]+\.(?:py|md|toml))\b")
CITED_ELSEWHERE = frozenset(
    {
        "setup.py", "node.json", "manage.py", "settings.py", "conftest.py", "binlog.toml", "broker.toml",
        "resolver.toml", "outbox.toml",
        "pyspark/sql/worker/lookup_data_sources.py",
    }
)  # fmt: skip
QUOTED = re.compile(r"``([A-Za-z_][\w.]*)(?:\(\))?``")
COMPOSED = re.compile(r"_*[a-z]+(?:_[a-z0-9]+)+")  # a module's, function's or variable's name of several words
# Of kazoo, nats and MySQL.
NAMES_ELSEWHERE = frozenset(
    {"_reset_watchers", "_session_callback", "get_json_object", "my_gcvt", "publish_async", "xa_detach_on_prepare"}
)


class Module(NamedTuple):
    """One file of the package."""

    name: str
    path: Path
    text: str


class Room(NamedTuple):
    """One row of the report; what is wanted is None where there is no budget."""

    name: str
    lines: int
    lines_wanted: int | None
    files: int
    files_wanted: int | None = None


class House:
    """The package below ``root``, read once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[str, Module] = {}
        for path in sorted((root / "txmq").rglob("*.py")):
            name = path.relative_to(root).as_posix().removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            self.modules[name] = Module(name, path, path.read_text("utf-8"))
        self.imports = {name: set(self._imported(module)) - {name} for name, module in self.modules.items()}

    def _imported(self, module: Module) -> Iterator[str]:
        tree = ast.parse(module.text)
        typing = [node for node in ast.walk(tree) if isinstance(node, ast.If) and _is_type_checking(node.test)]
        skipped = {inner for node in typing for inner in ast.walk(node)}  # names for annotations
        for node in ast.walk(tree):
            if node in skipped:
                continue
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.modules)
            elif isinstance(node, ast.ImportFrom) and node.module in self.modules:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield inner if inner in self.modules else str(node.module)

    def rooms(self) -> list[Room]:
        """Lines and files, room by room, and of the whole."""
        found = []
        for name, (packages, wanted) in ROOMS.items():
            texts = [module.text for module in self.modules.values() if _package(module.name) in packages]
            found.append(Room(name, sum(text.count("\n") for text in texts), wanted, len(texts)))
        for folder, (lines, files) in TOTALS.items():
            texts = [path.read_text("utf-8") for path in (self.root / folder).rglob("*.py")]
            found.append(Room(folder, sum(text.count("\n") for text in texts), lines, len(texts), files))
        return found

    def single_importers(self) -> list[str]:
        """Modules that one other module imports, and no more."""
        importers = Counter(other for imported in self.imports.values() for other in imported)
        return sorted(name for name, count in importers.items() if count == 1)

    def lone_protocols(self) -> list[str]:
        """Protocols that no file but their own names."""
        words = {name: set(re.findall(r"\w+", module.text)) for name, module in self.modules.items()}
        return [
            f"{name}.{node.name}"
            for name, module in self.modules.items()
            for node in ast.walk(ast.parse(module.text))
            if isinstance(node, ast.ClassDef) and _is_protocol(node)
            and all(node.name not in found for other, found in words.items() if other != name)
        ]  # fmt: skip

    def classes(self) -> tuple[int, int]:
        """How many classes there are, and how many of them are Protocols."""
        nodes = [
            node for module in self.modules.values() for node in ast.walk(ast.parse(module.text))
            if isinstance(node, ast.ClassDef)
        ]  # fmt: skip
        return len(nodes), sum(map(_is_protocol, nodes))

    def longest_chain(self) -> list[str]:
        """The modules on the longest chain of imports; packages' own files left out."""
        edges = {
            name: {other for other in imported if self.modules[other].path.name != "__init__.py"}
            for name, imported in self.imports.items()
            if self.modules[name].path.name != "__init__.py"
        }
        return _longest(edges)

    def missing_citations(self) -> Iterator[str]:
        """One line for each file that a comment or docstring names and that is not there."""
        top = [path for path in self.root.iterdir() if not path.name.startswith(".")]
        there = [path for place in top for path in (place, *place.rglob("*"))]
        known = {f"/{path.relative_to(self.root).as_posix()}" for path in there if path.is_file()}
        for folder in CODE:
            for path in sorted((self.root / folder).rglob("*.py")):
                for line, cited in _found_in_prose(path.read_text("utf-8"), CITED):
                    if cited not in CITED_ELSEWHERE and not any(place.endswith(f"/{cited}") for place in known):
                        yield f"{path.relative_to(self.root).as_posix()}:{line}: {cited} is not in the repository"

    def missing_names(self) -> Iterator[str]:
        """One line for each name of several words that a comment or docstring quotes and that is not in the code."""
        paths = [path for place in CODE for path in sorted((self.root / place).rglob("*.py"))]
        texts = {path: path.read_text("utf-8") for path in paths}
        known = NAMES_ELSEWHERE.union(CODE, {path.stem for path in paths}, *map(_words_of_code, texts.values()))
        for path, text in texts.items():
            for line, name in _found_in_prose(text, QUOTED):
                for part in name.split("."):
                    if COMPOSED.fullmatch(part) and part not in known:
                        yield f"{path.relative_to(self.root).as_posix()}:{line}: {name} is not in the code"


def _package(module: str) -> str:
    """The package right below txmq that a module is in; empty for those of txmq itself."""
    parts = module.split(".")
    return parts[1] if (ROOT / "txmq" / parts[min(1, len(parts) - 1)]).is_dir() and len(parts) > 1 else ""


def _is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def _is_protocol(node: ast.ClassDef) -> bool:
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in bases)


def _words_of_code(text: str) -> set[str]:
    """Names, and the words of strings that are no docstrings."""
    kinds = (tokenize.NAME, tokenize.STRING)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = [token.string for token in tokens if token.type in kinds and not token.string.startswith('"""')]
    return {word for part in code for word in re.findall(r"\w+", part)}


def _found_in_prose(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """Matches in comments and docstrings, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and token.string.startswith('"""')
        if token.type == tokenize.COMMENT or is_docstring:
            for match in pattern.finditer(token.string):
                yield token.start[0] + token.string.count("\n", 0, match.start()), match[1]


def _longest(edges: dict[str, set[str]]) -> list[str]:
    """The longest path; members of a cycle count once, where it is entered."""
    entered: set[str] = set()
    chains: dict[str, list[str]] = {}

    def follow(name: str) -> list[str]:
        if name not in entered:
            entered.add(name)
            tails = [follow(other) for other in sorted(edges.get(name, ()))]
            chains[name] = [name, *max(tails, key=len, default=[])]
        return chains.get(name, [])

    sys.setrecursionlimit(10_000)
    return max([follow(name) for name in sorted(edges)], key=len, default=[])


def _checkout(rev: str, folder: Path) -> Path:
    command = ["git", "archive", rev]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def _report(house: House, as_json: bool) -> int:
    rooms, chain, classes = house.rooms(), house.longest_chain(), house.classes()
    single, lone = house.single_importers(), house.lone_protocols()
    wrong = [*house.missing_citations(), *house.missing_names()]
    if as_json:
        figures = {"rooms": [row._asdict() for row in rooms], "classes": classes[0], "protocols": classes[1]}
        print(
            json.dumps(
                {**figures, "single_importers": single, "lone_protocols": lone, "chain": chain, "wrong": wrong},
                indent=2,
            )
        )
        return bool(wrong)
    print(f"{'room':48}{'lines':>8}{'wanted':>8}{'files':>7}{'wanted':>8}")
    for row in rooms:
        print(f"{row.name:48}{row.lines:8}{row.lines_wanted or '':>8}{row.files:7}{row.files_wanted or '':>8}")
    print(f"\n{classes[0]} classes, {classes[1]} of them Protocols; {len(lone)} of these are named in one file alone:")
    print("\n".join(f"  {name}" for name in lone))
    print(f"{len(single)} modules have one importer")
    print(f"the longest chain of imports has {len(chain)} (wanted {CHAIN_MAX}):\n  " + " > ".join(chain))
    print(f"\n{len(wrong)} citations of what is not there" + ("" if not wrong else ":"))
    print("\n".join(f"  {line}" for line in wrong))
    return bool(wrong)


def main() -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rev", help="measure this commit instead of the working tree")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    if options.rev is None:
        status = _report(House(ROOT), options.json)
        if not options.json:
            from tools import traces  # needs what txmq needs; another commit's figures do not

            print(f"\n{traces.report(traces.traces())}")
        return status
    with tempfile.TemporaryDirectory() as folder:
        return _report(House(_checkout(options.rev, Path(folder))), options.json)


if __name__ == "__main__":
    raise SystemExit(main())
