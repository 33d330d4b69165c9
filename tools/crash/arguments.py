"""The arguments of ``python -m tools.crash``."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.crash.campaign import SETTLE_S_MAX
from tools.crash.cluster.directory import STREAMED_PARTITIONS
from tools.crash.cluster.plan import FAULTS_A_ROUND

_DESCRIPTION = """\
Campaigns: real processes are killed with SIGKILL while they work, and started again; at the end the history of all of
them is held to what is stored. Without the name of a campaign: local and last-resource transactions with SQLite.
"""
_EPILOG = """\
examples:
  python -m tools.crash --cycles 20                      one broker, four workers, a database
  python -m tools.crash --homes --tls --cycles 60        two homes, all over TLS, each process as a user of its own
  python -m tools.crash --outbox --cycles 60             services on three databases, two relays, an operator
  python -m tools.crash --cluster --faults 18            three brokers and a Spark stream
  python -m tools.crash --cluster --faults 40 --streamed 0 --json report.json
                                                         the same without Spark; every time is in the file
  python -m tools.crash --cluster --seed 41 --faults 40  the faults of an earlier campaign again

what it says:
  a line for each death, while it runs; then times, counts and findings
  every promise was kept    exit 0, and the directory is removed
  BROKEN                    exit 1: each finding begins with its rule (A1 to A15, L1 to L13, G1 to G6; see
                            tools/checkers/history.py and groups.py); --cluster says below it what to look at
  STUCK                     exit 1: something that was waited for did not happen
The directory of a campaign that did not keep a promise is kept: logs, histories, data of the brokers and databases.
The same seed draws the same deaths; between them real processes run, so what was found may need several runs.
tools/crash/README.md has more. --xa, --aio, --homes, --outbox, --binlog and --cluster need MariaDB, --outbox
PostgreSQL as well; --homes, --spark and --cluster need Java.
"""


def parser() -> argparse.ArgumentParser:
    """Of all campaigns."""
    found = argparse.ArgumentParser(
        prog="python -m tools.crash", description=_DESCRIPTION, epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    _add_campaigns(found.add_argument_group("which campaign").add_mutually_exclusive_group())
    _add_lengths(found.add_argument_group("how long"))
    others = found.add_argument_group("how")
    others.add_argument("--seed", type=int, default=None, help="repeats the deaths of an earlier campaign")
    others.add_argument(
        "--sync", choices=("always", "interval", "never"), default="always", help="the broker's setting; one broker"
    )
    others.add_argument(
        "--tls", action="store_true",
        help="brokers, ZooKeeper and clients speak TLS, with certificates of both sides; each process logs in as a "
        "user of its own with the grants that it needs, and no more: a refusal is a finding",
    )  # fmt: skip
    others.add_argument(
        "--settle-s", type=float, default=SETTLE_S_MAX, metavar="SECONDS",
        help="nothing may stay in doubt for longer; more, if the machine is busy with others (default: %(default)g)",
    )  # fmt: skip
    others.add_argument(
        "--streamed", type=int, default=STREAMED_PARTITIONS, metavar="PARTITIONS",
        help="of the topic that the Spark stream of --cluster writes; 0: without Spark (default: %(default)s)",
    )  # fmt: skip
    others.add_argument(
        "--json", type=Path, metavar="FILE",
        help="write the report of --cluster and --binlog there (default: report.json in the directory, if kept)",
    )  # fmt: skip
    return found


def _add_campaigns(group: argparse._MutuallyExclusiveGroup) -> None:
    for name, text in (
        ("xa", "two MariaDB servers: XA and last resource; both databases die, too"),
        ("aio", "the same with txmq.aio and a SQLite file: 64 tasks, which are cancelled, too"),
        ("homes", "transactions over two homes, at each crash point"),
        ("groups", "a consumer group whose members come, go, pause and die"),
        ("ordered", "an ordered producer through outages and kills"),
        (
            "outbox",
            "outboxes on MariaDB, PostgreSQL, SQLite: services, relays, broker, databases; also copied and restored",
        ),
        (
            "binlog",
            "a binlog sync: reader, applier, broker and both databases die; load of each type of column, XA, DDL",
        ),
        ("spark", "a Spark stream from txmq to txmq; driver and broker die"),
        (
            "cluster",
            "three brokers, three ZooKeeper servers, and all of the above at once; each is killed, paused, restarted",
        ),
    ):
        group.add_argument(f"--{name}", action="store_true", help=text)


def _add_lengths(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--cycles", type=int, default=300, help="deaths (default: %(default)s)")
    group.add_argument(
        "--check-every", type=int, default=50, metavar="CYCLES", help="check the history (default: %(default)s)"
    )
    group.add_argument("--seconds", type=float, default=180.0, help="of --groups (default: %(default)g)")
    group.add_argument("--kills", type=int, default=20, help="of --spark (default: %(default)s)")
    group.add_argument(
        "--faults", type=int, default=FAULTS_A_ROUND,
        help="of --cluster; in %(default)s, the default, each process suffers each kind",
    )  # fmt: skip
