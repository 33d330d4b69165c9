"""A KeyboardInterrupt anywhere: a profile function stands for the signal.

CPython raises it where a call returns and where a function begins.
"""

from __future__ import annotations

import sys
from types import FrameType, ModuleType


class Strike:
    """Raises KeyboardInterrupt behind the n-th call that is made, or function that is entered, in some files."""

    def __init__(self, number: int, *modules: ModuleType) -> None:
        self.left, self._paths = number, [module.__file__ for module in modules]

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename in self._paths:
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt
