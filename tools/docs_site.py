"""``make docs``: a site with a search, in build/site, of the repository's pages and the docstrings (Sphinx).

The pages stand in the site as they stand in the repository, so that their links hold; ``docs/README.md`` is the
navigation. The API has a page for each module of ``MODULES``, with the names of its ``__all__``. A link that leads
nowhere, or a public name without a docstring, is an error: nothing is left in build/site, and the exit code is 1.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
COPIED = ("README.md", "ARCHITECTURE.md", "CHANGES.md", "LICENSE", "docs", "examples")
MODULES = (
    "txmq", "txmq.aio", "txmq.client", "txmq.errors", "txmq.xa", "txmq.spark.audit.audit", "txmq.spark.audit.spec",
    "txmq.spark.source.offsets", "txmq.testing.processes.broker", "txmq.testing.processes.mariadb",
    "txmq.testing.offset_store_contract",
)  # fmt: skip
_DIRECTIVE = "```{{eval-rst}}\n.. {kind}:: {name}\n```"
_LINK = re.compile(r"\[([^]]+)\]\(([^)#]+\.md)\)")
_SETTINGS: dict[str, Any] = {
    "project": "txmq",
    "root_doc": "index",
    "extensions": ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"],
    "html_theme": "furo",
    "html_title": "txmq",
    "html_copy_source": False,
    "myst_heading_anchors": 4,
    "autodoc_default_options": {"members": True, "member-order": "bysource", "show-inheritance": True},
    "autodoc_typehints": "signature",
    "autodoc_class_signature": "mixed",
    "napoleon_numpy_docstring": False,
    "napoleon_use_rtype": False,
    "napoleon_use_ivar": True,
    "suppress_warnings": ["myst.header", "toc.not_included"],
}


def public_objects(module: ModuleType) -> dict[str, object]:
    """What the module's ``__all__`` names, or else the classes and functions that it defines, by name."""
    names = getattr(module, "__all__", None)
    if names is not None:
        return {name: getattr(module, name) for name in names}
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }


def without_docstring(name: str, value: object) -> Iterator[str]:
    """The dotted names of a public object, and of its public methods and properties, that have no docstring."""
    if not inspect.getdoc(value):
        yield name
    if not inspect.isclass(value):
        return
    for attribute, member in inspect.getmembers(value):
        is_ours = inspect.isroutine(member) or isinstance(member, property)
        owner = next((cls for cls in value.__mro__ if attribute in vars(cls)), value)
        is_public = not attribute.startswith(("_", "test_"))  # a test of a contract is documented by its name
        if is_ours and is_public and owner.__module__.startswith("txmq") and not inspect.getdoc(member):
            yield f"{name}.{attribute}"


def missing_docstrings(modules: list[ModuleType]) -> list[str]:
    """The public names of these modules that have no docstring; each object is named once, where it comes first."""
    seen: set[int] = set()
    missing: list[str] = []
    for module in modules:
        for name, value in public_objects(module).items():
            if id(value) not in seen:
                missing += without_docstring(f"{module.__name__}.{name}", value)
            seen.add(id(value))
    return missing


def navigation(index: str) -> str:
    """What ``docs/README.md`` lists, as Sphinx wants it: sections, each with its pages in their order."""
    sections = []
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
        pages = [f"{name} <{_place(target)}>" for row in rows for name, target in _LINK.findall(row)]
        if pages:
            sections.append(_toctree(section.splitlines()[0], pages))
    sections.append(_toctree("API", [f"{name} <api/{name}>" for name in MODULES]))
    return "\n".join(["```{include} README.md", "```", "", *sections])


def _toctree(caption: str, pages: Sequence[str]) -> str:
    return "\n".join(["```{toctree}", f":caption: {caption}", ":hidden:", ":titlesonly:", "", *pages, "```", ""])


def _place(target: str) -> str:
    """A page, from the top of the repository: the index stands in docs."""
    name = target.removesuffix(".md")
    return name.removeprefix("../") if name.startswith("../") else f"docs/{name}"


def api_pages(modules: Sequence[ModuleType]) -> dict[str, str]:
    """A page for each module, for autodoc to fill in; what several modules name stands where it comes first."""
    seen: set[int] = set()
    pages = {}
    for module in modules:
        name, own = module.__name__, {}
        for word, value in public_objects(module).items():
            if id(value) not in seen:
                own[word] = value
            seen.add(id(value))
        summary = (inspect.getdoc(module) or "").partition("\n")[0]
        objects = [_DIRECTIVE.format(kind=_kind(value), name=f"{name}.{word}") for word, value in own.items()]
        pages[name] = "\n\n".join([f"# {name}", summary, *objects]) + "\n"
    return pages


def _kind(value: object) -> str:
    if inspect.isclass(value):
        return "autoexception" if issubclass(value, BaseException) else "autoclass"
    return "autofunction" if inspect.isroutine(value) else "autodata"


def write_pages(modules: list[ModuleType], pages: Path) -> None:
    """Put together what Sphinx reads."""
    shutil.rmtree(pages, ignore_errors=True)
    for name in COPIED:
        source, target = ROOT / name, pages / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    (pages / "api").mkdir()
    for name, text in api_pages(modules).items():
        (pages / "api" / f"{name}.md").write_text(text, "utf-8")
    (pages / "index.md").write_text(navigation((ROOT / "docs" / "README.md").read_text("utf-8")), "utf-8")


def build(pages: Path, site: Path) -> bool:
    """Build the site; whether it had nothing to warn of."""
    from sphinx.application import Sphinx

    made = Sphinx(
        pages, None, site, pages.parent / "doctrees", "html", _SETTINGS, status=None, warning=sys.stderr, freshenv=True
    )
    made.build(force_all=True)
    return not made.statuscode and not made._warncount  # noqa: SLF001  no other way to ask


def main() -> int:
    """Check the docstrings, then build the site."""
    modules = [importlib.import_module(name) for name in MODULES]
    if missing := missing_docstrings(modules):
        print(
            f"make docs: {len(missing)} names that are public have no docstring:", *missing, sep="\n  ", file=sys.stderr
        )
        return 1
    pages, site = BUILD / "pages", BUILD / "site"
    write_pages(modules, pages)
    shutil.rmtree(site, ignore_errors=True)
    if not build(pages, site):
        shutil.rmtree(site, ignore_errors=True)
        return 1
    print("build/site/index.html")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
