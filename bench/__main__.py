"""``python -m bench``: measure rows of the budget and print them with their bounds."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from bench import page, report
from bench.catalogue import ROWS
from bench.model import NotMeasuredError, Result, Row, Surroundings
from txmq.testing.bench.limits import bare_limits, facts

BARE_S_MAX = 0.2  # for each bare limit, after each measure of a row that is shown with some


def main(arguments: list[str] | None = None) -> int:
    """Run it; 1 if a row missed its bound or failed, 130 if it was interrupted."""
    options = _parse(arguments)
    chosen = [row for row in ROWS if row.is_chosen(options.rows)]
    if not chosen:
        print(f"no such row; there are: {' '.join(row.name for row in ROWS)}", file=sys.stderr)
        return 2
    options.directory.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=options.json)
    console.width = max(console.width, 165)  # narrower, the figures would be cut off
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.directory) as name:
        directory = Path(name)
        machine, bare = facts(directory), bare_limits(directory)
        results: list[Result] = []
        try:
            for row in chosen:
                results.append(_measure(row, directory, options.quick, console))
        except KeyboardInterrupt:
            console.print("interrupted: what follows was measured until then")
    content = report.to_json(results, machine, bare)
    kept = report.save(content, options.directory, time.strftime("%Y%m%d-%H%M%S"))
    drawn = page.save(results, machine, bare, kept.with_suffix(".html"))
    if options.json:
        print(json.dumps(content, indent=1))
    else:
        report.show(results, machine, bare, console)
        print(f"kept in {kept}\nto look at: {drawn.absolute()}")
    if len(results) < len(chosen):
        return 130
    return int(any(result.verdict in ("MISS", "failed") for result in results))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=main.__doc__, epilog=_names())
    parser.add_argument("--rows", nargs="*", default=[], metavar="NAME", help="only rows whose name holds one of these")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, measured once")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--directory", type=Path, default=Path("bench-results"), help="where results and data go")
    return parser.parse_args(arguments)


def _names() -> str:
    return "rows: " + " ".join(row.name for row in ROWS)


def _measure(row: Row, directory: Path, quick: bool, console: Console) -> Result:
    result = Result(row)
    own = directory / row.name
    own.mkdir()
    repeats = 1 if quick else row.repeats
    try:
        with row.open(Surroundings(own, quick)) as measure:
            for number in range(repeats):
                if console.is_terminal:
                    console.print(f"[dim]{row.name} {number + 1}/{repeats}[/]".ljust(60), end="\r")
                figures = measure()
                result.add(figures, bare_limits(own, BARE_S_MAX) if row.bare else None)
    except NotMeasuredError as error:
        result.missing = str(error)
    except Exception as error:  # noqa: BLE001  one row that fails must not take the others' figures with it
        result.failure = f"{type(error).__name__}: {error}"[:300]
    return result


if __name__ == "__main__":
    sys.exit(main())
