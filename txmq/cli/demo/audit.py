"""``txmq demo-audit``: damage planted behind txmq's back, and the audit that finds exactly that."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from txmq.cli import output
from txmq.runtime.build import pages

if TYPE_CHECKING:
    from txmq.cli.demo.audit_run import Report


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
    import time

    from txmq.cli.demo.audit_run import Play

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its broker and its databases go then, too
    started = time.monotonic()

    def say(text: str) -> None:
        if not as_json:
            typer.echo(f"{time.monotonic() - started:6.1f} s  {text}")

    report = Play(directory, say).run()
    if as_json:
        output.print_json(report.as_fields())
    else:
        _last_screen(report)
    raise SystemExit(0 if report.holds else output.STATUS_FAILED)


def _last_screen(report: Report) -> None:
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
