"""``make docs``: the API reference, made by pdoc from the docstrings, in build/api.

The reference has the modules of ``MODULES`` with the names of their ``__all__``. If a name, or a public method or
property of a class, has no docstring, nothing is written: each is printed in one line, and the exit code is 1.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "build" / "api"
MODULES = (
    "txmq", "txmq.client", "txmq.errors", "txmq.xa", "txmq.spark.audit.audit", "txmq.spark.audit.spec",
    "txmq.spark.source.offsets", "txmq.testing.processes.broker", "txmq.testing.processes.mariadb",
    "txmq.testing.offset_store_contract",
)  # fmt: skip


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


def write(modules: list[ModuleType], output: Path) -> None:
    """Let pdoc write one page for each module, an index and a search."""
    import pdoc.doc
    import pdoc.render

    # A type that pdoc cannot evaluate is shown as it is written.
    warnings.filterwarnings("ignore", "Error parsing type annotation", UserWarning)
    pdoc.render.configure(docformat="google", show_source=False)
    pages = {module.__name__: pdoc.doc.Module(module) for module in modules}
    for name, page in pages.items():
        file = output / f"{name.replace('.', '/')}.html"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(pdoc.render.html_module(page, pages), "utf-8")
    (output / "index.html").write_text(pdoc.render.html_index(pages), "utf-8")
    (output / "search.js").write_text(pdoc.render.search_index(pages), "utf-8")


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


def main() -> int:
    """Check the docstrings, then write the pages."""
    modules = [importlib.import_module(name) for name in MODULES]
    if missing := missing_docstrings(modules):
        print(
            f"make docs: {len(missing)} names that are public have no docstring:", *missing, sep="\n  ", file=sys.stderr
        )
        return 1
    write(modules, OUTPUT)
    print(f"{OUTPUT.relative_to(ROOT)}/index.html")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
