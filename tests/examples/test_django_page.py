"""docs/how-to/django.md, pasted whole: the project that it makes runs, and so does its second half."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import txmq
from txmq.testing.processes.broker import BrokerProcess, free_port

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/how-to/django.md").read_text("utf-8")
ADDRESS, PORT = "txmq://127.0.0.1:8123", "8000"
TIMEOUT_S = 200
# What the test has in other ways; and what it starts ends with the script.
BEFORE = f"""
set -e
trap 'kill $(jobs -p) 2>/dev/null || :' EXIT
pip() {{ :; }}
txmq() {{ [ "$1" = broker ] || {sys.executable} -m txmq.cli.main "$@"; }}
"""
LAST_RESOURCE = """
from django.test import RequestFactory
from orders.views_last_resource import take
from shop.messages import client, orders_db
orders_db.install(client)
print(take(RequestFactory().post("/"), "ben").status_code)
"""


def _blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def test_project_of_the_page_sends_what_it_says(tmp_path: Path, broker: BrokerProcess) -> None:
    files = {match[1]: block for block in _blocks("python") if (match := re.match(r"# (\S+)\n", block))}
    assert len(files) == len(_blocks("python")) - 1
    relay = next(block for block in _blocks("python") if not block.startswith("# ")).replace(ADDRESS, broker.address)
    begin, go_on = _blocks("sh")
    _run(tmp_path, broker, begin)
    for name, block in files.items():
        path = tmp_path / name
        kept = path.read_text("utf-8") if name == "shop/settings.py" else ""
        path.write_text(kept + block.replace(ADDRESS, broker.address), "utf-8")
    shown = _run(
        tmp_path, broker, go_on.replace(PORT, str(port := free_port())).replace("runserver", f"runserver {port}")
    )
    assert '{"order":1,"customer":"ada","total":"9.50"}' in shown
    recipe = (ROOT / "examples/django_last_resource.py").read_text("utf-8").partition("\ndef main(")[0]
    (tmp_path / "shop/together.py").write_text(recipe, "utf-8")
    for program, said in ((LAST_RESOURCE, "201"), (f"{relay}\nrelay.drain(30)\nprint(relay.stopped)", "None")):
        assert _run(tmp_path, broker, f"python manage.py shell -v0 -c '{program}'").strip() == said
    with txmq.connect(broker.address) as client:
        assert sorted(message.key or b"" for message in client.browse("orders")) == [b"ada", b"ben"]


def _run(folder: Path, broker: BrokerProcess, script: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TXMQ_BOOTSTRAP": broker.address,
    }
    ended = subprocess.run(
        ["bash", "-c", BEFORE + script], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
