"""A broker as a member of a cluster: what it imports."""

from __future__ import annotations

import subprocess
import sys


def test_nothing_imports_kazoo_before_an_ensemble_is_asked() -> None:
    modules = "txmq, txmq.cli.main, txmq.broker.shell.process, txmq.broker.shell.cluster_membership"
    program = f"import sys, {modules}; sys.exit('kazoo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
