"""Which build of txmq runs: the source, or its hot modules as C extensions (docs/compiled.md)."""

from __future__ import annotations

from txmq.runtime import net


def is_compiled() -> bool:
    """Whether the modules that pyproject.toml lists under ``tool.txmq.compiled`` run as C extensions."""
    return not net.__file__.endswith(".py")
