"""What a user with a wheel and no checkout gets: it runs, and what its texts name is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 240
NAMED = re.compile(r"(?:docs|examples)/[\w./-]+\.(?:md|py)|README\.md|ARCHITECTURE\.md")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel of what is in the repository; dependencies are those of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in listed.decode().split("\0")[:-1]:
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / "source" / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(folder / "source")]
    subprocess.run(build, check=True, timeout=TIMEOUT_S)
    venv.create(folder / "venv", with_pip=False)
    [wheel] = folder.glob("*.whl")
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    install = [*pip, "--python", str(folder / "venv" / "bin" / "python"), "install", "-q", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, timeout=TIMEOUT_S)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    shutil.rmtree(folder / "source")
    return folder / "venv"


def run(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "TXMQ_"))}
    command = [str(home / "bin" / words[0]), *words[1:]]
    return subprocess.run(command, cwd=home, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_the_demo_runs_and_names_what_is_there(home: Path) -> None:
    ended = run(home, "txmq", "demo", "--seed", "7")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    named = [Path(line.split()[-1]) for line in ended.stdout.splitlines() if line.endswith((".md", ".py"))]
    assert len(named) == 5
    for path in named:
        assert path.is_relative_to(home)
        assert path.is_file()


def test_whatever_text_of_package_names_is_in_wheel(home: Path) -> None:
    code = "from txmq.runtime.build import pages; import txmq; print(pages(), txmq.__file__)"
    pages, package = (Path(word) for word in run(home, "python", "-c", code).stdout.split())
    assert pages.is_relative_to(home)
    help_text = run(home, "txmq", "--help").stdout
    assert "".join(str(pages).split()) in "".join(re.sub("[│╭╮╰╯─]", "", help_text).split())
    sources = [path for path in package.parent.rglob("*.py") if pages not in path.parents]
    named = {name for path in sources for name in NAMED.findall(path.read_text("utf-8"))}
    assert len(named) > 8
    assert [name for name in sorted(named) if not (pages / name).is_file()] == []


def test_pages_of_the_wheel_link_only_to_what_is_there(home: Path) -> None:
    pages = Path(run(home, "python", "-c", "from txmq.runtime.build import pages; print(pages())").stdout.strip())
    broken = []
    for page in pages.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            if not (page.parent / target).exists():
                broken.append((page.name, target))
    assert broken == []


def test_how_to_install_what_extra_needs_is_what_wheel_says(home: Path) -> None:
    code = "from txmq.runtime.build import how_to_install as say; print(say('mysql')); print(say('spark'))"
    mysql, spark = run(home, "python", "-c", code).stdout.splitlines()
    assert mysql == "pip install 'mysqlclient>=2.2'"
    assert spark.startswith("pip install 'pyspark>=")
    assert {"numpy", "pyarrow", "pandas"} <= set(re.findall(r"[a-z]+", spark))


def test_nobody_is_told_to_install_txmq_from_an_index() -> None:
    told = re.compile(r"txmq\\{0,2}\[(?:spark|mysql)|pip install '?txmq\b")
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("txmq/**/*.py"), *ROOT.glob("examples/**/*.py")]
    assert [path.name for path in texts if told.search(path.read_text("utf-8"))] == []
