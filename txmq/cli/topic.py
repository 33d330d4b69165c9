"""``txmq topic``: create, list, describe, alter, close, open, delete."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from txmq.cli import output
from txmq.cli.connecting import connected, nearest, partly, raise_missing
from txmq.errors import ConfigError

if TYPE_CHECKING:
    from txmq.model import TopicConfig

app = output.command_group(
    "Create, list, change and delete topics. A partition never moves from one broker to another."
)

Name = Annotated[str, typer.Argument(metavar="TOPIC", help="Name of the topic.", show_default=False)]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE",
        help="retention_ms, retention_size_bytes, retention_policy (delete|archive), segment_size_bytes, "
        "segment_age_ms; 'none' lifts a limit. May be repeated.",
    ),
]  # fmt: skip
Publish = Annotated[bool, typer.Option("--publish", help="For publishing.")]
Read = Annotated[bool, typer.Option("--read", help="For reading.")]


@app.command()
def create(
    name: Name,
    partitions: Annotated[int | None, typer.Option(min=1, help="Number of partitions; it can grow later.")] = None,
    storage: Annotated[
        str | None, typer.Option(metavar="disk|memory", help="memory: fast, bounded, gone with the broker.")
    ] = None,
    settings: Settings = None,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """Create a topic.

    Defaults are the broker's settings that begin with default_. In a cluster its partitions are spread over the homes
    that are led now; each stays at its home for good (txmq cluster describe).

    [bold]Examples[/bold]

      txmq topic create orders --partitions 4
      txmq topic create audit --set retention_policy=archive
    """
    words = assignments(settings)
    words |= {key: value for key, value in {"partitions": partitions, "storage": storage}.items() if value is not None}
    with connected(bootstrap, name) as client:
        client.topics.create(name, **words)  # type: ignore[arg-type]
        _show(client.topics.describe(name), as_json=as_json)


@app.command("list")
def list_(bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP, as_json: output.Json = False) -> None:
    """List the topics.

    [bold]Examples[/bold]

      txmq topic list
      txmq topic list --json | jq -r '.[].name'
    """
    with connected(bootstrap) as client:
        topics = [fields_of(topic) for topic in client.topics.list()]
    columns = ("name", "partitions", "storage", "retention_ms", "retention_size_bytes", "accept_publish", "accept_read")
    output.show_rows("topics", columns, topics, as_json=as_json)


@app.command()
def describe(name: Name, bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP, as_json: output.Json = False) -> None:
    """Show a topic's settings and what each partition holds.

    [bold]Examples[/bold]

      txmq topic describe orders
    """
    with connected(bootstrap, name) as client:
        config = client.topics.describe(name)
        ranges, missing = partly(lambda: client.topics.watermarks(name))
    held = [{"topic": name, **item, "count": item["end"] - item["start"]} for item in ranges]
    if as_json:
        output.print_json(fields_of(config) | {"ranges": held})
        raise_missing(missing)
        return
    _show(config, as_json=False)
    homes = ["home"] if any("home" in item for item in held) else []
    fields = ("partition", "broker_number", "start", "end", "count", "bytes", *homes)
    rows = [[item.get(field) for field in fields] for item in held]
    columns = ("partition", "broker-number", "start", "end", "messages", "bytes", *homes)
    output.print_table("partitions", columns, rows)
    raise_missing(missing)


@app.command()
def alter(
    name: Name,
    partitions: Annotated[int | None, typer.Option(min=1, help="More partitions; never fewer.")] = None,
    settings: Settings = None,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """Change a topic's settings; those that are not named stay.

    More partitions move keys: the order per key starts anew. In a cluster they go to the homes that have fewest of the
    topic, among those that are led now; those that exist stay where they are, with their messages.

    [bold]Examples[/bold]

      txmq topic alter orders --partitions 8
      txmq topic alter orders --set retention_ms=none
    """
    words = assignments(settings)
    if partitions is not None:
        words["partitions"] = partitions
    if not words:
        raise ConfigError("nothing to change: say --partitions or --set KEY=VALUE")
    _show(_altered(name, words, bootstrap), as_json=as_json)


@app.command()
def close(
    name: Name,
    publish: Publish = False,
    read: Read = False,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """Close a topic for publishing (to drain it) or for reading; both without an option.

    [bold]Examples[/bold]

      txmq topic close orders --publish
    """
    _show_doors(_altered(name, _doors(publish, read, to=False), bootstrap), as_json=as_json)


@app.command("open")
def open_(
    name: Name,
    publish: Publish = False,
    read: Read = False,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """Open a topic again for publishing or reading; both without an option.

    [bold]Examples[/bold]

      txmq topic open orders --publish
    """
    _show_doors(_altered(name, _doors(publish, read, to=True), bootstrap), as_json=as_json)


@app.command()
def delete(
    name: Name,
    yes: output.Yes = False,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """Delete a topic and all its messages, for ever.

    [bold]Examples[/bold]

      txmq topic delete orders
      txmq topic delete orders --yes
    """
    with connected(bootstrap, name) as client:
        if not yes:
            client.topics.describe(name)  # an unknown topic is an error before the question
        output.confirm(yes, f"Delete topic {name} and all its messages?")
        client.topics.delete(name)
    output.report({"deleted": name}, f"topic {name} is deleted", as_json=as_json)


def assignments(words: list[str] | None) -> dict[str, object]:
    """``key=value`` words as keyword arguments; numbers, true, false and none are read as such.

    Raises:
        ConfigError: not of that form, not a topic's setting, or given twice.
    """
    values: dict[str, object] = {}
    for word in words or []:
        key, equals, text = word.partition("=")
        if not (equals and key):
            raise ConfigError(f"--set {word}: expected key=value")
        if key not in _settings():
            near = nearest(key, _settings())
            hint = f"did you mean {near!r}?" if near else f"known: {', '.join(_settings())}"
            raise ConfigError(f"--set {key}: unknown topic setting; {hint}")
        if key in values:
            raise ConfigError(f"--set {key} is given twice; give it once")
        plain: dict[str, object] = {"true": True, "false": False, "none": None}
        values[key] = int(text) if text.isascii() and text.isdigit() else plain.get(text, text)
    return values


def _settings() -> list[str]:
    from txmq.model import TopicConfig

    return [field.name for field in dataclasses.fields(TopicConfig) if field.name != "name"]


def fields_of(config: TopicConfig) -> dict[str, object]:
    """A topic's settings as JSON values."""
    fields = dataclasses.asdict(config)
    return {name: value.value if isinstance(value, enum.Enum) else value for name, value in fields.items()}


def _doors(publish: bool, read: bool, *, to: bool) -> dict[str, object]:
    both = not (publish or read)
    wanted = {"accept_publish": publish or both, "accept_read": read or both}
    return {setting: to for setting, chosen in wanted.items() if chosen}


def _altered(name: str, words: Mapping[str, object], bootstrap: str) -> TopicConfig:
    with connected(bootstrap, name) as client:
        client.topics.alter(name, **words)  # type: ignore[arg-type]
        return client.topics.describe(name)


def _show_doors(config: TopicConfig, *, as_json: bool) -> None:
    if as_json:
        _show(config, as_json=True)
        return
    publishing, reading = ("open" if is_open else "closed" for is_open in (config.accept_publish, config.accept_read))
    output.note(f"topic {config.name}: {publishing} for publishing, {reading} for reading")


def _show(config: TopicConfig, *, as_json: bool) -> None:
    output.show_fields(f"topic {config.name}", fields_of(config), as_json=as_json)
