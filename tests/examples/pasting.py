"""A page of ``docs/`` pasted whole into a folder: its files are written, its commands run by bash, with a broker."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from txmq.testing.processes.broker import BrokerProcess, free_port

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "txmq://127.0.0.1:8123"
TIMEOUT_S = 200
PORTS = ("8000", "8001")
HERE_ALREADY = "exit 0"  # what the test has in other ways
MODULES = {"django-admin": "django", "flask": "flask", "gunicorn": "gunicorn", "uvicorn": "uvicorn"}


class PastedPage:
    """One page, by its path; its database is a file of the folder."""

    def __init__(self, page: str, folder: Path, broker: BrokerProcess) -> None:
        self.folder, self._broker = folder, broker
        self.text = (ROOT / page).read_text("utf-8")
        changed = {ADDRESS: broker.address, "/tmp/": f"{folder}/", "--retry 5": "--retry 180 --retry-delay 1"}
        for written, here in changed.items():
            self.text = self.text.replace(written, here)
        self.ports = {port: str(free_port()) for port in PORTS}
        for port, here in self.ports.items():
            self.text = re.sub(rf"\b{port}\b", here, self.text)
        self._programs = folder / "bin"
        self._programs.mkdir()
        python = f'exec {sys.executable} -m {{}} "$@"'
        self._program("pip", HERE_ALREADY)
        self._program("txmq", f'[ "$1" != broker ] || {HERE_ALREADY}\n{python.format("txmq.cli.main")}')
        for program, module in MODULES.items():
            self._program(program, python.format(module))

    def blocks(self, kind: str) -> list[str]:
        return re.findall(rf"```{kind}\n(.*?)```", self.text, re.DOTALL)

    def files(self) -> dict[str, str]:
        """The blocks that say in their first line which file they are."""
        found = [(re.match(r"# (\S+)\n", block), block) for kind in ("python", "toml") for block in self.blocks(kind)]
        return {match[1]: block for match, block in found if match is not None}

    def write(self) -> None:
        """Write ``files``; Django's settings are added to those that there are."""
        for name, block in self.files().items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = path.read_text("utf-8") if path.name == "settings.py" else ""
            path.write_text(kept + block, "utf-8")

    def environment(self) -> dict[str, str]:
        """Of commands of the page."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
        return environment | {
            "PATH": os.pathsep.join([str(self._programs), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.folder),  # gunicorn has a socket there
            "TXMQ_BOOTSTRAP": self._broker.address,
            "UVICORN_PORT": self.ports["8000"],
            "GUNICORN_CMD_ARGS": f"--bind 127.0.0.1:{self.ports['8000']}",
        }

    def run(self, *scripts: str) -> str:
        """What they print, one after another in one shell."""
        said = self.folder / "said"
        with said.open("wb") as output:
            shell = subprocess.Popen(
                ["bash", "-e", "-c", "".join(scripts)], cwd=self.folder, env=self.environment(), stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                status = shell.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                status = None
            finally:  # with all that it left running
                with suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGKILL)
                shell.wait()
        assert status == 0, said.read_text("utf-8")
        return said.read_text("utf-8")

    def _program(self, name: str, script: str) -> None:
        path = self._programs / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
