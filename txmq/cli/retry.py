"""``txmq retry``: list, show, redeliver and drop messages that consumers have deferred."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from txmq.cli import output
from txmq.cli.connecting import connected
from txmq.cli.group import Group
from txmq.errors import ConfigError, StorageError

if TYPE_CHECKING:
    import txmq
    from txmq.client.admin.groups import Retries, Row, Selection
    from txmq.client.consumer.retry.retry_store import RetryStore
    from txmq.model import Message

app = output.command_group("Messages that consumers have deferred: look, have them delivered again, drop them.")
Store = Annotated[
    Path | None,
    typer.Option("--store", "-s", help="The members' retry_store on this host: contents and reasons.", metavar="FILE"),
]
Topic = Annotated[str | None, typer.Option("--topic", "-t", help="Only of this topic.")]
Partition = Annotated[int | None, typer.Option("--partition", "-p", min=0, help="Only of this partition.")]
Offset = Annotated[int | None, typer.Option("--offset", "-o", min=0, help="Only this message.")]
All = Annotated[bool, typer.Option("--all", help="All that match; needed without --offset.")]
_COLUMNS = ("topic", "partition", "offset", "state", "failures", "owner", "key", "reason")


@app.command("list")
def list_(
    group: Group, topic: Topic = None, partition: Partition = None, store: Store = None,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP, as_json: output.Json = False,
) -> None:  # fmt: skip
    """List what a group has deferred, as its saved offsets say; members may be active.

    States: [bold]waits[/bold] for its next retry; [bold]blocked[/bold] by an earlier message of its key;
    [bold]stale[/bold]: a row of the file that the group does not name; [bold]unreadable[/bold]: text of another
    version.

    [bold]Examples[/bold]

      txmq retry list billing
      txmq retry list billing --store var/retry.db --json | jq '.[].reason'
    """
    from txmq.client.admin.groups import Selection

    with connected(bootstrap, topic, group=group) as client, _opened(store) as kept:
        selection = Selection(topic, partition)
        _require_selection(client, selection)
        rows = [_fields(row) for row in _retries(client, group, kept).list(selection)]
    output.show_rows(f"deferred by {group}", _COLUMNS, rows, as_json=as_json)


@app.command()
def show(
    group: Group,
    topic: output.Topic,
    partition: Annotated[int, typer.Option("--partition", "-p", min=0, help="The partition.", show_default=False)],
    offset: Annotated[int, typer.Option("--offset", "-o", min=0, help="The message.", show_default=False)],
    store: Store = None, bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP, as_json: output.Json = False,
) -> None:  # fmt: skip
    """Show a message that was deferred, with its content: from the file, the log or the retry topic.

    [bold]Examples[/bold]

      txmq retry show billing --topic orders --partition 3 --offset 1200
    """
    from txmq.client.admin.groups import Selection

    with connected(bootstrap, topic, group=group) as client, _opened(store) as kept:
        retries = _retries(client, group, kept)
        found = [row for row in retries.list(Selection(topic, partition, offset)) if row.offset == offset]
        if not found:
            output.fail(f"{group} has not deferred {topic}/{partition}/{offset}; see txmq retry list {group}")
        fields = _fields(found[0]) | _content(retries.content(found[0]))
    output.show_fields(f"{topic}/{partition}/{offset}", fields, as_json=as_json)


@app.command()
def redeliver(
    group: Group, topic: Topic = None, partition: Partition = None, offset: Offset = None, everything: All = False,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP, as_json: output.Json = False,
) -> None:  # fmt: skip
    """Have messages delivered again at once, with all their retries before them.

    Members may be active: they get the partitions anew, and messages they have under way there come again.

    [bold]Examples[/bold]

      txmq retry redeliver billing --topic orders --partition 3 --offset 1200
      txmq retry redeliver billing --all
    """
    selection = _selection(topic, partition, offset, everything=everything)
    with connected(bootstrap, topic, group=group) as client:
        _require_selection(client, selection)
        count = _retries(client, group, None).redeliver(selection)
    _require_any(group, selection, count)
    output.report({"group": group, "redelivered": count}, f"{group}: {count} redelivered", as_json=as_json)


@app.command()
def drop(
    group: Group, topic: Topic = None, partition: Partition = None, offset: Offset = None, everything: All = False,
    unreadable: Annotated[
        bool, typer.Option("--unreadable", help="All that a partition has deferred under a text that cannot be read.")
    ] = False,
    store: Store = None, bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP, as_json: output.Json = False,
) -> None:  # fmt: skip
    """Forget messages, as if they had been acknowledged. Members may be active, as in redeliver.

    They stay in the log: read them with txmq consume --topic TOPIC --partition N --from OFFSET. Rows of files on other
    hosts are removed when a member there gets the partition.

    [bold]Examples[/bold]

      txmq retry drop billing --topic orders --partition 3 --offset 1200
      txmq retry drop billing --topic orders --partition 3 --unreadable
    """
    selection = _selection(topic, partition, offset, everything=everything or (unreadable and partition is not None))
    with connected(bootstrap, topic, group=group) as client, _opened(store) as kept:
        _require_selection(client, selection)
        retries = _retries(client, group, kept)
        count = retries.drop_unreadable(selection) if unreadable else retries.drop(selection)
    _require_any(group, selection, count)
    output.report({"group": group, "dropped": count}, f"{group}: {count} dropped", as_json=as_json)


def _selection(topic: str | None, partition: int | None, offset: int | None, *, everything: bool) -> Selection:
    from txmq.client.admin.groups import Selection

    if offset is not None and (topic is None or partition is None):
        raise ConfigError("--offset needs --topic and --partition")
    if partition is not None and topic is None:
        raise ConfigError("--partition needs --topic")
    if offset is None and not everything:
        raise ConfigError("say which message: --topic, --partition and --offset; or --all for all that is meant")
    return Selection(topic, partition, offset)


def _require_selection(client: txmq.Client, selection: Selection) -> None:
    """Refuse a topic or partition that does not exist: nothing would be found, without a word."""
    if selection.topic is not None and selection.partition is not None:
        client.offsets(selection.topic, selection.partition)
    elif selection.topic is not None:
        client.topics.describe(selection.topic)


def _require_any(group: str, selection: Selection, count: int) -> None:
    if selection.offset is not None and count == 0:
        where = f"{selection.topic}/{selection.partition}/{selection.offset}"
        output.fail(f"{group} has not deferred {where}; see txmq retry list {group}")


def _retries(client: txmq.Client, group: str, store: RetryStore | None) -> Retries:
    from txmq.client.admin.groups import Retries

    return Retries(client, group, store)


@contextmanager
def _opened(path: Path | None) -> Iterator[RetryStore | None]:
    """The retry store, if one is named, for a block; a missing file is not created."""
    from txmq.client.consumer.retry.retry_store import RetryStore

    if path is None:
        yield None
        return
    if not path.is_file():
        raise StorageError(f"no retry store at {path}")
    store = RetryStore(path)
    try:
        yield store
    finally:
        store.close()


def _fields(row: Row) -> dict[str, Any]:
    stored = row.stored
    return {
        "topic": row.topic, "partition": row.partition, "offset": row.offset, "state": row.state,
        "failures": row.failures, "owner": row.owner, "key": output.content(stored.message.key) if stored else None,
        "reason": row.problem or (stored.reason if stored else None),
    }  # fmt: skip


def _content(message: Message | None) -> dict[str, Any]:
    if message is None:
        return {"value": None, "content": "gone"}
    headers = {name: output.content(text) for name, text in message.headers.items()}
    return {
        "key": output.content(message.key), "value": output.content(message.value), "headers": headers,
        "tag": message.tag, "time": output.moment(message.timestamp_ms), "txid": message.txid,
        "size_bytes": len(message.value or b""),
    }  # fmt: skip
