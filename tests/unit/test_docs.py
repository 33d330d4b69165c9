"""The pages: links lead somewhere, comments cite files that are there, and the error reference is that of the code."""

from __future__ import annotations

import builtins
import inspect
import re
import textwrap
from pathlib import Path

import pytest

import txmq
from tools.house import House
from txmq import errors
from txmq.broker.core import VERBS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


def _anchors(page: Path) -> set[str]:
    """Of each heading what GitHub makes of it."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    broken = []
    for link in LINK.finditer(page.read_text("utf-8")):
        target = (page.parent / link[1]).resolve() if link[1] else page
        if not target.exists() or (link[2] and link[2] not in _anchors(target)):
            broken.append(link[0])
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A: `b` c\n[x](#a-b-c) [y](#d) [z](none.md) [w](page.md#e) [v](https://e.org/none)", "utf-8")
    assert broken_links(page) == ["](#d)", "](none.md)", "](page.md#e)"]


def test_the_index_has_every_page_and_every_program() -> None:
    index = ROOT / "docs/README.md"
    linked = {(index.parent / link[1]).resolve() for link in LINK.finditer(index.read_text("utf-8"))}
    there = {*PAGES, *(ROOT / "examples").glob("*.py")} - {index, ROOT / "README.md"}
    assert there - linked == set()


def test_comments_cite_files_that_are_there() -> None:
    assert list(House(ROOT).missing_citations()) == []


def test_comments_quote_names_that_are_in_the_code() -> None:
    assert list(House(ROOT).missing_names()) == []


def test_the_borders_of_tables_in_docstrings_stand_alone() -> None:
    """What folds prose may take a table for it."""
    wrong = []
    for path in (ROOT / "txmq").rglob("*.py"):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if "=====" in line and not re.fullmatch(r' *(r?""")?=+(  ?=+)+|=+', line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}")
    assert wrong == []


def test_a_quoted_name_that_is_gone_is_found(tmp_path: Path) -> None:
    (tmp_path / "txmq").mkdir()
    module = tmp_path / "txmq" / "old_name.py"
    module.write_text('"""Uses ``old_name``, ``new_name`` and ``table.former_name``."""\nnew_name = 1\n', "utf-8")
    assert list(House(tmp_path).missing_names()) == ["txmq/old_name.py:1: table.former_name is not in the code"]


def _rows_of_the_error_reference() -> dict[str, tuple[list[str], str, str, bool]]:
    """Of each error: its bases, the code and name on the wire or nothing, whether to retry, and whether it is bold."""
    page = (ROOT / "docs/reference/errors.md").read_text("utf-8").split("<!-- errors: begin -->")[1]
    rows = {}
    for line in page.splitlines():
        if match := re.match(r"\| (\**)`(\w+)`\1 \|", line):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            code = cells[2] if len(cells) == 6 else ""
            rows[match[2]] = (re.findall(r"`(\w+)`", cells[1]), code, cells[-2], bool(match[1]))
    return rows


def _told_by_the_code(cls: type[errors.TxmqError]) -> tuple[list[str], str, str, bool]:
    code = f"{cls.code} `{cls.wire_name}`" if issubclass(cls, errors.BrokerError) else ""
    return (
        [base.__name__ for base in cls.__bases__],
        code,
        "yes" if cls.retriable else "no",
        hasattr(txmq, cls.__name__),
    )


def test_error_reference_has_every_error_as_code_has_it() -> None:
    classes = [cls for cls in vars(errors).values() if inspect.isclass(cls) and issubclass(cls, errors.TxmqError)]
    assert _rows_of_the_error_reference() == {cls.__name__: _told_by_the_code(cls) for cls in classes}


def test_the_glossary_has_each_word_once() -> None:
    entries = re.findall(r"^\| ([^|]+) \| [^|-]", (ROOT / "docs/glossary.md").read_text("utf-8"), re.MULTILINE)
    words = [word for entry in entries if entry != "word" for word in entry.split(", ")]
    assert len(words) > 60
    assert [word for word in words if words.count(word) > 1] == []


def test_the_code_uses_every_word_of_the_glossary() -> None:
    entries = re.findall(r"^\| ([^|]+) \| [^|-]", (ROOT / "docs/glossary.md").read_text("utf-8"), re.MULTILINE)
    words = {word for entry in entries if entry != "word" for word in entry.split(", ")}
    code = "".join(path.read_text("utf-8") for path in (ROOT / "txmq").rglob("*.py"))
    joined = re.sub(r"[-_\s]+", "", code).lower()  # as a name or as text
    assert [word for word in sorted(words) if re.sub(r"[-\s]", "", word).lower() not in joined] == []


OTHERS_ERRORS = {
    "CancelledError",
    "DBAPIError",
    "DataError",
    "IntegrityError",
    "OperationalError",
}  # asyncio's, SQLAlchemy's, drivers'


def test_the_names_of_txmq_on_the_pages_are_there() -> None:
    text = "".join(page.read_text("utf-8") for page in PAGES)
    assert set(re.findall(r"\btxmq\.([A-Z][A-Za-z]+)\b", text)) - set(txmq.__all__) == set()
    named = set(re.findall(r"(?<![\w.])[A-Z][A-Za-z]+Error\b", text)) - OTHERS_ERRORS
    assert [name for name in sorted(named) if not hasattr(errors, name) and not hasattr(builtins, name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_programs_of_a_page_are_python(page: Path) -> None:
    for program in re.findall(r"^( *)```python\n(.*?)^ *```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        compile(textwrap.dedent(program[1]), str(page), "exec")


def test_architecture_finds_verbs_in_the_files_that_have_them() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    verbs = {verb.decode() for verb in VERBS}
    found = re.findall(r"/(prepare_commit|decide)\.py` \(([a-z, ]+)\)", page)
    assert len(found) == 2
    for name, words in found:
        functions = re.findall(r"^def (\w+)", (ROOT / f"txmq/broker/verbs/{name}.py").read_text("utf-8"), re.MULTILINE)
        assert set(words.split(", ")) == verbs.intersection(functions), name
