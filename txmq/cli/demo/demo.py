"""``txmq demo``: the promise of txmq, proved on this machine; ``txmq demo-audit``: planted damage, and the audit that
finds exactly that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from txmq.cli import output
from txmq.runtime.build import pages

if TYPE_CHECKING:
    from txmq.cli.demo import audit_run
    from txmq.cli.demo.run import Report


def demo(
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Work here and leave everything to be looked at.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Repeat the random moments of an earlier run.")] = None,
    as_json: output.Json = False,
) -> None:
    """Kill an order service and its broker with SIGKILL, again and again, and show that nothing came apart.

    An order service writes rows into SQLite and messages into txmq, each pair in one transaction.
    It and its broker are killed at random and at the worst moments, and started again.
    Then rows and messages are compared, one to one and in order. Then the broker is away, a shop goes on, and a
    relay takes what waits in its outbox to the broker when that is back. Exit status 1 if anything differs.

    [bold]Examples[/bold]

      txmq demo
      txmq demo --seed 7 --keep /tmp/txmq-demo
    """
    import random
    import signal
    import tempfile
    import time
    from contextlib import nullcontext

    from txmq.cli.demo.run import Play
    from txmq.runtime.private_files import make_private_directory

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its broker and its files go then, too
    seed = time.time_ns() % 1_000_000 if seed is None else seed
    if keep is not None:
        make_private_directory(keep, exist_ok=False)
    say = _say_with_seconds(as_json=as_json)
    say(f"an order service, a broker, and SIGKILL (seed {seed})")
    with nullcontext(str(keep)) if keep else tempfile.TemporaryDirectory(prefix="txmq-demo-") as directory:
        report = Play(Path(directory).absolute(), say, random.Random(seed)).run()  # noqa: S311 - moments, not secrets
    if as_json:
        output.print_json(as_fields(report))
    else:
        _last_screen(report)
    raise SystemExit(0 if report.holds else output.STATUS_FAILED)


def as_fields(report: Report) -> dict[str, object]:
    """The report as one flat JSON object."""
    parts = ("comparison", "handed_over")
    rest = {name: value for name, value in dataclasses.asdict(report).items() if name not in parts}
    found = dataclasses.asdict(report.comparison) | dataclasses.asdict(report.handed_over)
    return {"holds": report.holds, **found, **rest}


def _last_screen(report: Report) -> None:
    found, shop = report.comparison, report.handed_over
    rows: list[tuple[str, object, str]] = [
        ("killed with SIGKILL", f"{report.service_kills} x service, {report.broker_kills} x broker", ""),
        ("rows in SQLite", found.rows, ""),
        ("messages in the topic orders", found.messages, _verdict(found.messages == found.rows)),
        ("payments (two topics, one transaction)", found.payments, ""),
        ("rows without message", found.missing, _verdict(found.missing == 0)),
        ("messages without row", found.phantoms, _verdict(found.phantoms == 0)),
        ("duplicates", found.duplicates, _verdict(found.duplicates == 0)),
        ("acknowledged and lost", found.lost, _verdict(found.lost == 0)),
        ("half of a transaction", found.torn, _verdict(found.torn == 0)),
        ("customers out of order", found.misordered, _verdict(found.misordered == 0)),
        ("left in doubt by the kills", report.in_doubt_seen, ""),
        ("still in doubt", report.in_doubt_left, _verdict(report.in_doubt_left == 0)),
        ("", "", ""),
        ("the shop's rows, the broker away", shop.shipments, ""),
        ("messages in the topic shipments", shop.handed_over, _verdict(shop.handed_over == shop.shipments)),
        ("rows not handed over, or twice", shop.not_handed_over + shop.twice, _verdict(shop.holds)),
        ("customers out of order", shop.customers_misordered, _verdict(shop.customers_misordered == 0)),
        ("seconds", f"{report.seconds:.1f}", ""),
    ]
    typer.echo("\nwhat was proved" if report.holds else "\nthe promise is BROKEN")
    output.print_table("", ("", "", "as promised"), rows)
    if report.holds:
        typer.echo(
            "\nEvery order has its row and its message, once and in order, whatever was killed when.\n\n"
            f"  Which of the two is for you     {pages() / 'docs' / 'how-to' / 'choose.md'}\n"
            f"  The same service in 60 lines    {pages() / 'examples' / 'order_service_sqlite.py'}\n"
            f"  Ten minutes with your own       {pages() / 'docs' / 'quickstart.md'}\n"
            f"  What is promised, what is not   {pages() / 'README.md'}\n"
            f"  How it works                    {pages() / 'ARCHITECTURE.md'}"
        )
    else:
        typer.echo("\nThis must not happen. Run it again with --keep DIR --seed N (see the first line), and report it.")


def demo_audit(
    directory: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where the reports go.")] = Path(
        "var/demo-audit"
    ),
    as_json: output.Json = False,
) -> None:
    """Run an order service, damage its rows and messages, and show that the audit finds each fault and nothing else.

    A service writes rows into SQLite and messages into txmq. The audit says that they agree. Then a row is deleted and
    one slipped in, a message is forged and one sent twice, and two orders swap places, all behind txmq's back. The
    audit names each of them. Exit status 1 if it does not. Needs PySpark and Java 17 or later.

    [bold]Examples[/bold]

      txmq demo-audit
      txmq demo-audit --output var/demo-audit --json
    """
    import signal

    from txmq.cli.demo.audit_run import Play

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its broker and its databases go then, too
    say = _say_with_seconds(as_json=as_json)
    report = Play(directory, say).run()
    if as_json:
        output.print_json(report.as_fields())
    else:
        _audit_screen(report)
    raise SystemExit(0 if report.holds else output.STATUS_FAILED)


def _audit_screen(report: audit_run.Report) -> None:
    rows: list[tuple[object, ...]] = [
        ("nothing yet", "clean" if report.is_clean_before else "findings", _verdict(report.is_clean_before))
    ]
    rows += [(fault.done, f"{fault.kind} {fault.identity}", _verdict(fault.is_found)) for fault in report.faults]
    rows.append(("and besides", f"{report.others} findings", _verdict(report.others == 0)))
    typer.echo("\nwhat was proved" if report.holds else "\nthe audit is WRONG")
    output.print_table("", ("damage", "what the audit must find", "found"), rows)
    if report.holds:
        typer.echo(
            f"\n{report.rows} rows were held against {report.messages} messages, one to one and in order. "
            "Each fault was\nfound under its name, and nothing else was.\n\n"
            f"  Look at the report              {report.page}\n"
            f"  Audit your own topic            txmq audit --help, {pages() / 'docs' / 'how-to' / 'audit.md'}\n"
            "  Why the two agree by themselves txmq demo"
        )
    else:
        typer.echo(f"\nThis must not happen. Keep {report.page.parent} and report it.")


def _verdict(holds: bool) -> str:
    return "yes" if holds else "NO"


def _say_with_seconds(*, as_json: bool) -> Callable[[str], None]:
    """What says each line of a play after the seconds that have passed; to programs, nothing."""
    import time

    started = time.monotonic()

    def say(text: str) -> None:
        if not as_json:
            typer.echo(f"{time.monotonic() - started:6.1f} s  {text}")

    return say
