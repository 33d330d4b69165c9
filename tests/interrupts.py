"""A KeyboardInterrupt anywhere: a profile or trace function stands for the signal.

CPython raises it where a call returns, where a function begins, and where a loop begins again.
"""

from __future__ import annotations

import sys
from opcode import opname
from types import FrameType, ModuleType
from typing import Any


class Strike:
    """Raises KeyboardInterrupt after the n-th call that is made, or function that is entered, in some files."""

    def __init__(self, number: int, *modules: ModuleType) -> None:
        self.left, self._paths = number, [module.__file__ for module in modules]

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename in self._paths:
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt


class LoopStrike:
    """The same where a loop in some files begins again, between ``start`` and ``stop``.

    ``sys.monitoring`` is no way to do it: what its callback raises at a jump misses the ``try`` that the loop is in.
    """

    def __init__(self, number: int, *modules: ModuleType) -> None:
        self.left, self._paths = number, [module.__file__ for module in modules]

    def start(self) -> None:
        """From here on loops count."""
        sys._getframe().f_trace_opcodes = True  # 3.12 looks once, when tracing begins, whether any frame wants them
        sys.settrace(self._traced)

    def stop(self) -> None:
        """And no longer."""
        sys.settrace(None)

    def _traced(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._paths:
            return None
        frame.f_trace = self._traced  # 3.13 takes the next line only from a frame that is traced
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and opname[frame.f_code.co_code[frame.f_lasti]] == "JUMP_BACKWARD":
            self.left -= 1
            if self.left == 0:
                self.stop()
                raise KeyboardInterrupt
        return self._traced
