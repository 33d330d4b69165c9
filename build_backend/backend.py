"""The build backend: setuptools; and mypy, where TXMQ_COMPILE=1 asks for compiled modules (docs/compiled.md)."""

from __future__ import annotations

import os
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  every hook that is not here


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """What pip installs into the build's own environment."""
    needed: list[str] = build_meta.get_requires_for_build_wheel(config_settings)
    return [*needed, "mypy>=2.4,<3"] if os.environ.get("TXMQ_COMPILE") == "1" else needed
