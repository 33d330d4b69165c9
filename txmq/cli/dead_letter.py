"""``txmq dead-letter``: messages that consumers gave up: list, show, replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from txmq.cli import output
from txmq.cli.connecting import connected
from txmq.cli.group import Group
from txmq.errors import ConfigError

if TYPE_CHECKING:
    from txmq.client.consumer.retry.redrive import Letter, Origin

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Messages that a group's consumers gave up: look, send them again.",
)
Limit = Annotated[int, typer.Option(help="How many at most, the newest.", min=1)]
_COLUMNS = ("offset", "time", "from", "attempts", "reason", "replayed")


@app.command("list")
def list_(
    group: Group, limit: Limit = 1000,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP, as_json: output.Json = False,
) -> None:  # fmt: skip
    """List the dead letters of a group, oldest first: why, from where, how often, and whether they were sent again.

    [bold]Examples[/bold]

      txmq dead-letter list billing
      txmq dead-letter list billing --json | jq '.[] | select(.replayed | not)'
    """
    from collections import deque

    from txmq.client.consumer.retry.redrive import LetterReplay

    with connected(bootstrap, group=group) as client:
        found = LetterReplay(client, group)
        done = found.done()
        rows = [_fields(letter, done) for letter in deque(found.letters(), maxlen=limit)]
    if as_json:
        output.print_json(rows)
    else:
        output.print_table(f"dead letters of {group}", _COLUMNS, [[row[column] for column in _COLUMNS] for row in rows])


@app.command()
def show(
    group: Group,
    offset: Annotated[int, typer.Option("--offset", "-o", min=0, help="Of the letter.", show_default=False)],
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP, as_json: output.Json = False,
) -> None:  # fmt: skip
    """Show a dead letter with its content.

    [bold]Examples[/bold]

      txmq dead-letter show billing --offset 7
    """
    from txmq.client.consumer.retry.redrive import LetterReplay

    with connected(bootstrap, group=group) as client:
        found = LetterReplay(client, group)
        letter = next((letter for letter in found.letters() if letter.message.offset == offset), None)
        if letter is None:
            output.fail(f"{found.topic} has no letter at {offset}; see txmq dead-letter list {group}")
        fields = _fields(letter, found.done()) | _content(letter)
    if as_json:
        output.print_json(fields)
    else:
        output.print_fields(f"{found.topic}/{offset}", fields)


@app.command()
def replay(
    group: Group,
    offset: Annotated[
        list[int] | None, typer.Option("--offset", "-o", min=0, help="Of a letter; may stand several times.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All letters that were not sent again yet.")] = False,
    to: Annotated[
        str | None, typer.Option(metavar="TOPIC", help="Send to this topic; by default to where each came from.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also what was sent again before: it comes twice.")] = False,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """Send dead letters again, each message once, also if this is killed and repeated, or runs twice at a time.

    By default to the topic and partition each came from, where every group consumes it once more.
    The transaction that sends also writes what it sent into GROUP.dead-letter.replayed.
    The letters stay where they are.

    [bold]Examples[/bold]

      txmq dead-letter replay billing --offset 7 --offset 9
      txmq dead-letter replay billing --all --to orders-again
    """
    from collections import Counter

    from txmq.client.consumer.retry.redrive import LetterReplay

    if everything == bool(offset):
        raise ConfigError("say which letters: --offset, once or several times, or --all")
    wanted, counted = set(offset or ()), Counter[str]()
    with connected(bootstrap, to, group=group) as client:
        found = LetterReplay(client, group)
        chosen = [letter for letter in found.letters() if letter.message.offset in wanted]
        missing = wanted - {letter.message.offset for letter in chosen}
        if missing:
            output.fail(f"{found.topic} has no letter at {', '.join(map(str, sorted(missing)))}; nothing was sent")
        for replayed in found.replay(found.letters() if everything else chosen, to, again=again):
            counted[replayed.outcome] += 1
    if as_json:
        output.print_json({"group": group, "sent": counted["sent"], "before": counted["done"], "gone": counted["gone"]})
    else:
        output.note(
            f"{group}: {counted['sent']} sent, {counted['done']} had been sent before, "
            f"{counted['gone']} have no content"
        )


def _fields(letter: Letter, done: set[Origin]) -> dict[str, Any]:
    message, origin = letter.message, letter.origin
    return {
        "offset": message.offset, "time": output.moment(message.timestamp_ms),
        "from": "/".join(map(str, origin)) if origin else None, "attempts": letter.word("attempts"),
        "reason": letter.word("reason"), "replayed": origin in done, "key": output.content(message.key),
        "value": letter.word("value") or None, "size_bytes": len(message.value or b""),
    }  # fmt: skip


def _content(letter: Letter) -> dict[str, Any]:
    message = letter.message
    headers = {name: output.content(text) for name, text in message.headers.items()}
    shown = output.content(message.value) if not letter.word("value") else f"({letter.word('value')})"
    return {"key": output.content(message.key), "value": shown, "headers": headers, "tag": message.tag}
