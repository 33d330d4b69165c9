"""``txmq dead-letter``: list, show and redrive messages that consumers gave up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from txmq.cli import output
from txmq.cli.connecting import connected
from txmq.cli.group import Group
from txmq.errors import ConfigError

if TYPE_CHECKING:
    from txmq.client.consumer.retry.dead_letters import DeadLetter, Origin

app = output.command_group("Messages that a group's consumers gave up: look at them, send them again.")
Limit = Annotated[int, typer.Option(help="How many at most, the newest.", min=1)]
_COLUMNS = ("offset", "time", "from", "attempts", "reason", "redriven")


@app.command("list")
def list_(
    group: Group, limit: Limit = 1000,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP, as_json: output.Json = False,
) -> None:  # fmt: skip
    """List the dead letters of a group, oldest first: why, from where, how often, and whether they were sent again.

    [bold]Examples[/bold]

      txmq dead-letter list billing
      txmq dead-letter list billing --json | jq '.[] | select(.redriven | not)'
    """
    from collections import deque

    from txmq.client.consumer.retry.dead_letters import Redrive

    with connected(bootstrap, group=group) as client:
        found = Redrive(client, group)
        done = found.done()
        rows = [_fields(dead_letter, done) for dead_letter in deque(found.dead_letters(), maxlen=limit)]
    output.show_rows(f"dead letters of {group}", _COLUMNS, rows, as_json=as_json)


@app.command()
def show(
    group: Group,
    offset: Annotated[int, typer.Option("--offset", "-o", min=0, help="Of the dead letter.", show_default=False)],
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP, as_json: output.Json = False,
) -> None:  # fmt: skip
    """Show a dead letter with its content.

    [bold]Examples[/bold]

      txmq dead-letter show billing --offset 7
    """
    from txmq.client.consumer.retry.dead_letters import Redrive

    with connected(bootstrap, group=group) as client:
        found = Redrive(client, group)
        dead_letter = next((one for one in found.dead_letters() if one.message.offset == offset), None)
        if dead_letter is None:
            output.fail(f"{found.topic} has no dead letter at {offset}; see txmq dead-letter list {group}")
        fields = _fields(dead_letter, found.done()) | _content(dead_letter)
    output.show_fields(f"{found.topic}/{offset}", fields, as_json=as_json)


@app.command()
def redrive(
    group: Group,
    offset: Annotated[
        list[int] | None, typer.Option("--offset", "-o", min=0, help="Of a dead letter; may stand several times.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All dead letters that were not sent again yet.")] = False,
    to: Annotated[
        str | None, typer.Option(metavar="TOPIC", help="Send to this topic; by default to where each came from.")
    ] = None,
    origins: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="TOPIC", help="They may come from this topic, too; may stand several times."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Also messages that were sent again before: they come twice.")
    ] = False,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """Send dead letters again, each message once, even if the command is killed and repeated, or runs twice at a time.

    By default to the topic and partition each came from, where every group consumes it once more. One that says it came
    from a topic that the group is not known to read is left out, unless you name that topic: --from.
    The transaction that sends also writes what it sent into GROUP.dead-letter.redriven.
    The dead letters stay where they are.

    [bold]Examples[/bold]

      txmq dead-letter redrive billing --offset 7 --offset 9
      txmq dead-letter redrive billing --all --to orders-again
    """
    from collections import Counter

    from txmq.client.consumer.retry.dead_letters import Redrive

    if everything == bool(offset):
        raise ConfigError("say which dead letters: --offset, once or several times, or --all")
    wanted, counted = set(offset or ()), Counter[str]()
    with connected(bootstrap, to, group=group) as client:
        found = Redrive(client, group, origins or ())
        chosen = [dead_letter for dead_letter in found.dead_letters() if dead_letter.message.offset in wanted]
        missing = wanted - {dead_letter.message.offset for dead_letter in chosen}
        if missing:
            output.fail(f"{found.topic} has no dead letter at {', '.join(map(str, sorted(missing)))}; nothing was sent")
        for redriven in found.redrive(found.dead_letters() if everything else chosen, to, again=again):
            counted[redriven.outcome] += 1
    sent, before, gone, foreign = (counted[outcome] for outcome in ("sent", "done", "gone", "foreign"))
    text = f"{group}: {sent} sent, {before} had been sent before, {gone} have no message to send"
    if foreign:
        text += f", {foreign} name topics that the group does not read (--from TOPIC)"
    fields = {"group": group, "sent": sent, "before": before, "gone": gone, "foreign": foreign}
    output.report(fields, text, as_json=as_json)


def _fields(dead_letter: DeadLetter, done: set[Origin]) -> dict[str, Any]:
    message, origin = dead_letter.message, dead_letter.origin
    return {
        "offset": message.offset, "time": output.moment(message.timestamp_ms),
        "from": "/".join(map(str, origin[:3])) if origin else None, "attempts": dead_letter.header("attempts"),
        "reason": dead_letter.header("reason"), "redriven": origin in done, "key": output.content(message.key),
        "value": dead_letter.header("value") or None, "size_bytes": len(message.value or b""),
    }  # fmt: skip


def _content(dead_letter: DeadLetter) -> dict[str, Any]:
    message = dead_letter.message
    headers = {name: output.content(text) for name, text in message.headers.items()}
    shown = output.content(message.value) if not dead_letter.header("value") else f"({dead_letter.header('value')})"
    return {"key": output.content(message.key), "value": shown, "headers": headers, "tag": message.tag}
