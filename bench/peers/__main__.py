"""``python -m bench.peers``, which is ``make bench-peers``: txmq against its peers, one table, one page of drawings."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench import page, report
from bench.model import Result
from bench.peers.catalogue import PEERS
from bench.peers.model import Peer
from bench.peers.run import QUICK_SECONDS, ROUNDS, SECONDS, WORK_NAMES, Plan, run
from bench.peers.shares import shares
from bench.peers.table import charts, markdown
from txmq.testing.bench.limits import bare_limits, facts

Facts = dict[str, str]
Bare = dict[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 if something failed or a promise was missed, 130 if it was interrupted."""
    options = _parse(arguments)
    peers = [peer for peer in PEERS if not options.peers or any(name in peer.name for name in options.peers)]
    works = [name for name in WORK_NAMES if not options.works or name in options.works]
    options.directory = options.directory.absolute()  # servers have working directories of their own
    options.directory.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    rounds, seconds = (1, QUICK_SECONDS) if options.quick else (options.rounds, SECONDS)
    with tempfile.TemporaryDirectory(prefix="peers-", dir=options.directory, ignore_cleanup_errors=True) as name:
        machine, bare = facts(Path(name)), bare_limits(Path(name))
        started = time.monotonic()
        results: list[Result] = []
        interrupted = False
        try:
            plan = Plan(peers, works, rounds, seconds, Path(name))
            at_rest = run(plan, results, lambda text: console.print(f"[dim]{text}[/]"))
            machine["all servers at rest"] = f"{100 * at_rest:.0f} % of a processor"
        except KeyboardInterrupt:
            interrupted = True
            console.print("interrupted: what follows was measured until then")
    results += shares({result.row.name: result for result in results}, peers)
    _keep(results, machine, bare, options.directory, peers)
    console.print(f"{rounds} rounds took {time.monotonic() - started:.0f} s")
    if interrupted:
        return 130
    return int(any(result.verdict in ("MISS", "failed") for result in results))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=main.__doc__)
    names = " ".join(peer.name for peer in PEERS)
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME", help=f"only some of: {names}")
    parser.add_argument("--works", nargs="*", default=[], metavar="WORK", choices=WORK_NAMES, help=" ".join(WORK_NAMES))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often each work is measured, in turns")
    parser.add_argument("--quick", action="store_true", help="a quarter of the work, measured once")
    parser.add_argument("--directory", type=Path, default=Path("bench-results"), help="where results and data go")
    return parser.parse_args(arguments)


def _keep(results: Sequence[Result], facts: Facts, bare: Bare, directory: Path, peers: Sequence[Peer]) -> None:
    """JSON with all samples, the page, and the table, which is printed."""
    kept = report.save(report.to_json(results, facts, bare), directory, time.strftime("peers-%Y%m%d-%H%M%S"))
    drawn = page.save(results, facts, bare, kept.with_suffix(".html"), charts(peers))
    text = markdown(results, facts, peers)
    kept.with_suffix(".md").write_text(text, "utf-8")
    print(f"{text}\nkept in {kept}\nto look at: {drawn.absolute()}")


if __name__ == "__main__":
    sys.exit(main())
