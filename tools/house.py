"""``make house``: measure the layout of txmq/ and check the rules that keep it easy to find one's way in.

The report has one row for each folder: members (modules and sub-packages directly in it), levels (modules on the
longest chain of imports among the members) and imports between members. Below it stand the longest chain of imports
of the whole package, the rules that do not hold, and the hands that a call passes on the client's side
(``tools/traces.py``). The exit code is 1 if a rule does not hold.

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
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CODE = ("txmq", "pyspark_txmq", "tests", "tools", "examples", "bench")
MODULE_LINES_MAX = 450
FOLDER_FILES_MAX = 22
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
# Parts of identifiers that were given up for the field's words (docs/glossary.md).
FORMER_WORDS = frozenset(
    {
        "aside", "beat", "bury", "claim", "claims", "desk", "fate", "lane", "lanes", "patience", "patient", "peer",
        "peers", "settler", "tracker", "trackers", "undone", "unsure",
    }
)  # fmt: skip
FORMER_CLASSES = frozenset(
    {
        "Alone", "Aside", "Claims", "FakeHome", "Fate", "Half", "Hold", "Holds", "Lane", "Link", "Patience", "Peer",
        "Pin", "Place", "Settler", "Share", "Side", "Slot", "Tracker", "TransactionHome", "Turns", "XaDesk",
    }
)  # fmt: skip


class Module(NamedTuple):
    """One file of the package."""

    name: str
    path: Path
    text: str


class Folder(NamedTuple):
    """One row of the report."""

    name: str
    files: int
    members: int
    levels: int
    imports: int


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
        for node in ast.walk(ast.parse(module.text)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.modules)
            elif isinstance(node, ast.ImportFrom) and node.module in self.modules:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield inner if inner in self.modules else str(node.module)

    def folders(self) -> list[Folder]:
        """Every package with its figures."""
        packages = sorted(name for name, module in self.modules.items() if module.path.name == "__init__.py")
        return [self._folder(name) for name in packages]

    def _folder(self, package: str) -> Folder:
        depth = package.count(".") + 2
        members = {".".join(name.split(".")[:depth]) for name in self.modules if name.startswith(f"{package}.")}
        edges: dict[str, set[str]] = {member: set() for member in members}
        for name, imported in self.imports.items():
            member = ".".join(name.split(".")[:depth])
            if member in members:
                edges[member] |= {".".join(other.split(".")[:depth]) for other in imported} & members - {member}
        files = sum(1 for path in self.modules[package].path.parent.glob("*.py") if path.name != "__init__.py")
        return Folder(package, files, len(members), len(_longest(edges)), sum(map(len, edges.values())))

    def longest_chain(self) -> list[str]:
        """The modules on the longest chain of imports; packages' own files left out."""
        edges = {
            name: {other for other in imported if self.modules[other].path.name != "__init__.py"}
            for name, imported in self.imports.items()
            if self.modules[name].path.name != "__init__.py"
        }
        return _longest(edges)

    def broken_rules(self) -> Iterator[str]:
        """One line for each place at which a rule does not hold."""
        for folder in self.folders():
            if folder.files > FOLDER_FILES_MAX:
                yield f"{folder.name}: {folder.files} files, at most {FOLDER_FILES_MAX}"
        for module in self.modules.values():
            place = module.path.relative_to(self.root).as_posix()
            lines = module.text.count("\n")
            if lines > MODULE_LINES_MAX:
                yield f"{place}: {lines} lines, at most {MODULE_LINES_MAX}"
            yield from (f"{place}:{line}: {word}" for line, word in _former_words(module.text))
            yield from (
                f"{place}:{number}: client: Any"
                for number, text in enumerate(module.text.splitlines(), 1)
                if re.search(r"\bclient: Any\b", text)
            )
        yield from self.missing_citations()
        yield from self.missing_names()

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


def _words_of_code(text: str) -> set[str]:
    """Names, and the words of strings that are no docstrings."""
    kinds = (tokenize.NAME, tokenize.STRING)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = [token.string for token in tokens if token.type in kinds and not token.string.startswith('"""')]
    return {word for part in code for word in re.findall(r"\w+", part)}


def _former_words(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        parts = token.string.split("_")
        is_former = token.string.lstrip("_") in FORMER_CLASSES or not FORMER_WORDS.isdisjoint(parts)
        if token.type == tokenize.NAME and is_former:
            yield token.start[0], token.string


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
    folders, chain, broken = house.folders(), house.longest_chain(), list(house.broken_rules())
    if as_json:
        print(
            json.dumps(
                {"folders": [row._asdict() for row in folders], "longest_chain": chain, "broken": broken}, indent=2
            )
        )
        return bool(broken)
    print(f"{'folder':34}{'files':>6}{'members':>9}{'levels':>8}{'imports':>9}")
    for row in folders:
        print(f"{row.name:34}{row.files:6}{row.members:9}{row.levels:8}{row.imports:9}")
    print(f"\n{len(house.modules)} files; the longest chain of imports has {len(chain)}:\n  " + " > ".join(chain))
    print(f"\n{len(broken)} rules do not hold" + ("" if not broken else ":"))
    print("\n".join(f"  {line}" for line in broken))
    return bool(broken)


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
