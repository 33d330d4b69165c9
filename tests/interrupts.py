"""A KeyboardInterrupt anywhere: a profile or trace function stands for the signal.

CPython raises it where a call returns, where a function begins, and where a loop begins again.
"""

from __future__ import annotations

import sys
from opcode import opname
from types import FrameType, ModuleType
from typing import Any


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


class LoopStrike:
    """The same where a loop in some files begins again: a trace function, for ``sys.settrace``."""

    def __init__(self, number: int, *modules: ModuleType) -> None:
        self.left, self._paths = number, [module.__file__ for module in modules]

    def __call__(self, frame: FrameType, event: str, _: Any) -> LoopStrike | None:
        if frame.f_code.co_filename not in self._paths:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and opname[frame.f_code.co_code[frame.f_lasti]] == "JUMP_BACKWARD":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self
