"""``txmq bench``: the figures of this broker and this disk, beside the bare limits of the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from txmq.cli import output
from txmq.errors import ConfigError

if TYPE_CHECKING:
    from txmq.cli.bench_run import Plan, Report
    from txmq.testing.bench.model import Load


HELP = """Measure a broker: rates and latencies, beside the bare limits of this machine in the same run.

Takes about 30 seconds. What it writes (up to 1 GB, in DIR or in topics of its own) is removed again.
Ctrl-C ends it early and shows what was measured until then.

[bold]Rows[/bold]

  put-pipelined   puts of one message, many outstanding (raw generator)
  put-single      one put, its answer, the next (raw generator)
  send-many       producer.send_many of messages with keys
  consume         client.browse, then the same as raw batches
  delivery        from producer.send to a waiting reader
  tx-local        transactions of one message, one thread
  tx-threads      the same, many threads of one process
  send-threads    one send at a time by each of many threads
  aio-send        the same by tasks of one loop (txmq.aio)
  aio-tx          transactions of one message by tasks of one loop

[bold]Bare limits: the same machine, no broker[/bold]

  sync 4 KiB          write and fdatasync, in a loop
  echo                64 bytes to another process and back
  echo after a sync   the same, a sync in between
  loopback            64 KiB blocks to another process and back

A put is answered when the disk has it: one waiting caller can be no faster than "echo after a sync".
Many callers share a sync. Client, broker and other programs share the cores: compare on a quiet machine.

[bold]Examples[/bold]

  txmq bench
  txmq bench --directory /srv/txmq --size 1000
  txmq bench --sync interval --rows put
  txmq bench --server txmq://127.0.0.1:8123 --rows tx,delivery --json
"""


def bench(
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            "--bootstrap",
            "-b",
            metavar="txmq://HOST:PORT",
            show_default=False,
            help="A broker that runs already. Without: one of its own, for as long as this takes.",
        ),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Only rows with one of these in the name.", show_default=False),
    ] = None,
    seconds: Annotated[float, typer.Option(help="About how long each row is measured.", min=0.01, max=3600.0)] = 1.5,
    messages: Annotated[
        int | None,
        typer.Option(help="So many a row, instead of a time.", min=1, max=5_000_000, show_default=False),
    ] = None,
    size: Annotated[int, typer.Option(metavar="BYTES", help="Size of a message's value.", min=1, max=1 << 20)] = 100,
    outstanding: Annotated[int, typer.Option(help="Puts without an answer, pipelined.", min=1, max=65_536)] = 2048,
    threads: Annotated[
        int, typer.Option(help="Threads of tx-threads and send-threads, tasks of aio-send and aio-tx.", min=1, max=1024)
    ] = 64,
    directory: Annotated[
        Path, typer.Option(metavar="DIR", help="Where its own broker and the sync loop write: the disk to be measured.")
    ] = Path(),
    sync: Annotated[
        str | None, typer.Option(metavar="always|interval|never", help="Setting of its own broker. [always]")
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other setting of its own broker.")
    ] = None,
    as_json: output.Json = False,
) -> None:
    """``txmq bench``; ``HELP`` is its text."""
    import signal
    import tempfile

    from txmq.cli import bench_run

    chosen = _loads(rows)
    settings = _settings(server, sync, assignments)
    if not directory.is_dir():
        raise ConfigError(f"--directory {directory}: there is no such directory")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its broker and its files go then, too
    try:
        with tempfile.TemporaryDirectory(prefix="txmq-bench-", dir=directory) as own:
            plan = bench_run.Plan(
                server, chosen, Path(own).absolute(), settings, seconds, messages, size, outstanding, threads
            )
            with _progress(plan) as say:
                report = bench_run.run(plan, say)
    except KeyboardInterrupt:
        output.fail("interrupted before anything was measured", output.STATUS_INTERRUPTED)
    _show(report, as_json=as_json)


def _show(report: Report, *, as_json: bool) -> None:
    from txmq.cli import bench_run

    if as_json:
        output.print_json(bench_run.as_fields(report))
    else:
        bench_run.show(report)
    if report.interrupted:
        raise SystemExit(output.STATUS_INTERRUPTED)
    raise SystemExit(output.STATUS_FAILED if any(row.failure for row in report.rows) else 0)


def _loads(names: str | None) -> tuple[Load, ...]:
    from txmq.testing.bench.loads import LOADS

    if names is None:
        return LOADS
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if not any(name in load.name for load in LOADS):
            raise ConfigError(f"--rows {name}: no such row; there are {', '.join(load.name for load in LOADS)}")
    return tuple(load for load in LOADS if any(name in load.name for name in wanted))


def _settings(server: str | None, sync: str | None, assignments: list[str] | None) -> dict[str, object]:
    """Settings of our own broker, checked here; a running broker has its own."""
    from txmq.addresses import parse_bootstrap
    from txmq.config_sources import load_settings, parse_assignments

    if server is not None and len(parse_bootstrap(server)) > 1:
        raise ConfigError(f"--server {server}: bench measures one broker; give one address")
    settings: dict[str, object] = dict(parse_assignments(assignments or []))
    if sync is not None:
        settings["sync"] = sync
    if server is not None and settings:
        raise ConfigError(f"--set and --sync are for a broker of its own; the one at {server} has its settings")
    for name in ("data", "listen"):
        if name in settings:
            raise ConfigError(f"--set {name}: bench chooses it; --directory says where its broker writes")
    load_settings(None, {}, settings)
    return settings


@contextmanager
def _progress(plan: Plan) -> Iterator[Callable[[str], None]]:
    """A bar on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from txmq.cli import bench_run

    columns = (TextColumn("{task.description:<14}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=bench_run.steps(plan))
        is_first = True

        def say(step: str) -> None:
            nonlocal is_first
            progress.update(task, description=step, advance=0 if is_first else 1)
            is_first = False

        yield say
