"""``make test-mysql``: the tests that a database takes part in, on a newer MySQL and MariaDB.

Theory of operation. Debian's package mirror, which this machine installs from, serves newer suites, too. Their servers
need a newer C library: nothing of them is installed. apt-get downloads them, with lists and a status of its own, they
are unpacked below ``build/databases``, and a script in the place of each program starts it by the C library that came
with it. ``TXMQ_TEST_DATABASE`` tells the tests of it (txmq/testing/processes/database_programs.py).

Invariants:
    * nothing of the machine is changed: no package, no list, no file outside of ``build``;
    * a server is unpacked whole or not there: its directory gets its name last;
    * where one cannot be had, one line says so, and the exit status is 1 in any case.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from txmq.testing.processes.database_programs import VARIABLE

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "databases"
# What the servers never load: perl is for their scripts, gconv for programs that ask the C library to convert.
LEFT_OUT = ("perl", "libperl", "libgdbm", "libdb5", "libc-gconv")
TESTS = (
    "tests/services/xa", "tests/services/outbox", "tests/services/sqlalchemy", "tests/services/django_app",
    "tests/services/binlog", "tests/services/consumer/test_offset_stores.py",
    "tests/services/consumer/test_consumers_with_stores.py", "tests/services/consumer/test_acks_in_transactions.py",
    "tests/services/aio/test_databases.py", "tests/services/cli/test_resolver_once.py",
    "tests/services/programs/test_database_programs.py", "tests/services/programs/test_mariadb.py",
    "tests/services/programs/test_users_databases.py",
)  # fmt: skip
CAMPAIGNS = ("--xa", "--binlog")  # of tools.crash
_LOADER = """\
#!/bin/sh
root={root}
exec "$root/usr/lib64/ld-linux-x86-64.so.2" --argv0 "$0" --library-path "$root/usr/lib/x86_64-linux-gnu" \\
    "$root/usr/libexec/{program}" "$@" {options}
"""


class UnavailableError(Exception):
    """A server that cannot be had; the text says why."""


@dataclass(frozen=True, slots=True)
class Newer:
    """A server that Debian has in a newer suite.

    Attributes:
        title: what it is called.
        suite: of Debian.
        package: apt-get installs it with all that it depends on.
        program: of the server.
        share: its messages and character sets, below usr/share.
        binlog_reader: the program of the same packages that shows a binlog; empty: they have none.
    """

    title: str
    suite: str
    package: str
    program: str
    share: str
    binlog_reader: str

    @property
    def root(self) -> Path:
        """Below which it is unpacked."""
        return PLACE / self.program


SERVERS = (
    Newer("MySQL", "sid", "mysql-server-core", "mysqld", "mysql", "mysqlbinlog"),
    Newer("MariaDB", "trixie", "mariadb-server-core", "mariadbd", "mariadb", ""),
)


def unpack(server: Newer) -> None:
    """Have the server below its root.

    Raises:
        UnavailableError: the packages cannot be had, or do not run here.
    """
    if server.root.exists():
        return
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise UnavailableError(f"{program} is not here: packages of Debian are needed")
    unfinished = server.root.with_suffix(".new")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    archives = _download(server, server.root.with_suffix(".apt"))
    for archive in archives:
        if not archive.name.startswith(LEFT_OUT):
            _run("dpkg-deb", "-x", str(archive), str(unfinished))
    _start_by_own_loader(server, unfinished)
    unfinished.rename(server.root)
    shutil.rmtree(server.root.with_suffix(".apt"))


def _download(server: Newer, place: Path) -> list[Path]:
    for needed in ("lists/partial", "cache/archives/partial"):
        (place / needed).mkdir(parents=True, exist_ok=True)
    (place / "status").write_text("")
    mirrors = _run("apt-get", "indextargets", "--format", "$(REPO_URI)").split()
    mirror = next((uri for uri in mirrors if "security" not in uri), None)
    if mirror is None:
        raise UnavailableError("apt-get knows no mirror")
    (place / "sources.list").write_text(f"deb {mirror} {server.suite} main\n")
    options = {
        "Dir::Etc::SourceList": place / "sources.list", "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": place / "lists", "Dir::State::status": place / "status", "Dir::Cache": place / "cache",
        "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled": "false",
    }  # fmt: skip
    apt = ["apt-get", "-q", "-y", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
    _run(*apt, "update")
    _run(*apt, "install", "--download-only", "--no-install-recommends", server.package)
    return sorted((place / "cache" / "archives").glob("*.deb"))


def _start_by_own_loader(server: Newer, unfinished: Path) -> None:
    usr = unfinished / "usr"
    if not (usr / "lib64" / "ld-linux-x86-64.so.2").exists():
        raise UnavailableError("its C library is not one for x86-64")
    share = f"$root/usr/share/{server.share}"
    options = {
        "basedir": "$root/usr", "lc-messages-dir": share, "character-sets-dir": f"{share}/charsets",
        "plugin-dir": "$root/usr/lib/mysql/plugin",
    }  # fmt: skip
    words = " ".join(f'--{name}="{value}"' for name, value in options.items())
    (usr / "lib" / "mysql" / "plugin").mkdir(parents=True, exist_ok=True)
    _put_loader(server, usr / "sbin" / server.program, words)
    if server.binlog_reader:
        _put_loader(server, usr / "bin" / server.binlog_reader)
    # mariadb-install-db asks it for defaults, even where none are wanted; it is in a package of clients.
    if not (usr / "bin" / "my_print_defaults").exists():
        _write_script(usr / "bin" / "my_print_defaults", "#!/bin/sh\n")


def _put_loader(server: Newer, program: Path, options: str = "") -> None:
    """Put the script in the place of a program, which moves to usr/libexec."""
    moved = program.parents[1] / "libexec" / program.name
    moved.parent.mkdir(exist_ok=True)
    program.rename(moved)
    _write_script(program, _LOADER.format(root=f"'{server.root}'", program=program.name, options=options))


def _write_script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise UnavailableError(f"{command[0]} failed: {said[0] if said else f'status {done.returncode}'}")
    return done.stdout


def test(server: Newer, tests: Sequence[str], workers: int, cycles: int) -> bool:
    """Run the tests, and the campaigns of XA and binlog, on a server that is unpacked; whether all went well."""
    environment = {**os.environ, VARIABLE: str(server.root)}
    commands = [[sys.executable, "-m", "pytest", "-q", "-n", str(workers), "--dist", "loadfile", *tests]]
    if cycles:
        for campaign in CAMPAIGNS:
            commands.append([sys.executable, "-m", "tools.crash", campaign, "--cycles", str(cycles)])
    statuses = [subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode for command in commands]
    return not any(statuses)


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m tools.newer_databases``; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.newer_databases", description=__doc__.partition("\n")[0])
    parser.add_argument("tests", nargs="*", default=TESTS, help="instead of all that a database takes part in")
    parser.add_argument("--only", choices=[server.program for server in SERVERS], help="one of the servers")
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests (default %(default)s)")
    parser.add_argument("--cycles", type=int, default=40, help="of each campaign; 0: none (default %(default)s)")
    options = parser.parse_args(arguments)
    green = True
    for server in SERVERS:
        if options.only in (None, server.program):
            green &= _played(server, options)
    return 0 if green else 1


def _played(server: Newer, options: argparse.Namespace) -> bool:
    began = time.monotonic()
    try:
        unpack(server)
    except UnavailableError as error:
        print(f"txmq test-mysql: {server.title} of Debian {server.suite} cannot be had here: {error}", flush=True)
        return False
    print(f"txmq test-mysql: {server.title} is in {server.root} ...", flush=True)
    is_green = test(server, options.tests, options.workers, options.cycles)
    word = "green" if is_green else "RED"
    print(f"txmq test-mysql: {server.title} {word} after {time.monotonic() - began:.0f} s", flush=True)
    return is_green


if __name__ == "__main__":
    sys.exit(main())
