"""``txmq tx``: transactions that hang, what became of one, and what an operator may do about it.

``list`` and ``show`` only read. ``commit``, ``rollback`` and ``complete`` decide for a resource: they want
``--heuristic``, a reason, and a yes to a sentence that names the risk. ``give-up``, for a home that is lost, wants the
last two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from txmq.cli import output, tx_explain
from txmq.cli.connecting import connected, partly, raise_missing
from txmq.errors import (
    ConfigError,
    ForbiddenError,
    OffsetOutOfRangeError,
    TopicClosedError,
    UnknownTopicError,
    UnknownTransactionError,
)

if TYPE_CHECKING:
    from txmq.client import Client
    from txmq.model import Message

SHOWN_MAX = 100
Row = dict[str, Any]
app = output.command_group("Look at transactions, and settle what hangs.")
Txid = Annotated[
    str,
    typer.Argument(metavar="TXID", help="Transaction id, as in errors, logs and the list.", show_default=False),
]
Reason = Annotated[
    str, typer.Option("--reason", help="Your name and the reason; kept until forget.", show_default=False)
]
Heuristic = Annotated[
    bool, typer.Option("--heuristic", help="You decide alone, without proof of what the database or application did.")
]


# --- keys and values of messages --------------------------------------------------------------------------------------


def message_rows(client: Client, fields: Row, *, with_values: bool) -> list[Row]:
    """Topic, partition, offset and key of each message, the first SHOWN_MAX of them; the beginning of its value."""
    found = []
    for message, offset in _messages(client, fields):
        row = {"topic": message.topic, "partition": message.partition, "offset": offset}
        row["key"] = output.content(message.key)
        found.append(row | ({"value": output.content(message.value)} if with_values else {}))
        if len(found) == SHOWN_MAX:
            break
    return found


def _messages(client: Client, fields: Row) -> Iterator[tuple[Message, int | None]]:
    """Prepared ones lie with the broker, committed ones in the log; of others nothing is kept."""
    if fields.get("state") == "prepared":
        try:
            yield from ((message, None) for message in client.transactions.messages(fields["txid"]))
        except UnknownTransactionError:  # it was settled a moment ago
            return
    elif fields.get("outcome") == "committed":
        for part in fields.get("parts", ()):
            yield from _placed(client, part)


def _placed(client: Client, part: Row) -> Iterator[tuple[Message, int]]:
    start = part.get("base_offset", part.get("offset"))
    if start is None or part["topic"] is None:
        return
    end, at = start + part["count"], start
    while at < end:
        try:
            messages = client.fetch(part["topic"], part["partition"], at)
        except (OffsetOutOfRangeError, UnknownTopicError, TopicClosedError):  # retention, or not visible yet
            return
        wanted = [message for message in messages if at <= message.offset < end]
        yield from ((message, message.offset) for message in wanted)
        if not wanted:
            return
        at = wanted[-1].offset + 1


# --- the commands -----------------------------------------------------------------------------------------------------


@app.command("list")
def list_(
    in_doubt: Annotated[bool, typer.Option("--in-doubt", help="Prepared and decided ones: the default.")] = False,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="30s", help="Only what hangs longer: ms, s, m, h or d.")
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(metavar="prepared|placing|decided|placed|heuristic|all", help="Only those in that state."),
    ] = None,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """List the transactions in doubt: prepared, or decided and not known to have committed everywhere.

    The client that owns them, its group, or a resolver (txmq resolver) settles them; none is ever guessed.
    The second part is reported by resolvers: branches that are prepared in a database and lock rows, but have no
    decision at the broker ("in-database"), and databases that cannot be reached.

    [bold]Examples[/bold]

      txmq tx list --in-doubt --older-than 30s
      txmq tx list --state heuristic
    """
    wanted = _state(state, in_doubt=in_doubt)
    older_ms = 0 if older_than is None else tx_explain.duration_ms(older_than)
    with connected(bootstrap) as client:
        found, missing = partly(lambda: client.transactions.list(state=wanted))
        resources, unseen = partly(client.transactions.resources) if wanted in ("in-doubt", "all") else ([], None)
    rows = [{**row, "why": tx_explain.why(row)} for row in found if row["age_ms"] >= older_ms]
    hung = tx_explain.hanging(resources, {row["txid"] for row in found}, older_ms)
    if as_json:
        output.print_json(rows + hung)
        raise_missing(missing, unseen)
        return
    word = "in doubt" if wanted == "in-doubt" else "found" if wanted == "all" else wanted
    typer.echo(f"{len(rows)} {word}{' at the broker' if hung else ''}")
    for row in rows:  # an id is 67 characters, and people copy it: no table that folds it
        sentence = f"{row['state']}, {row['kind']}, {tx_explain.age(row['age_ms'])}: {row['why']}"
        typer.echo(output.escaped(row["txid"]))
        output.print_paragraph(sentence, "    ")
    for indent, line in tx_explain.branch_lines(resources, hung, older_ms):
        output.print_paragraph(line, indent)
    raise_missing(missing, unseen)


def _state(state: str | None, *, in_doubt: bool) -> str:
    from txmq.client.admin.transactions import STATES

    if state is not None and in_doubt:
        raise ConfigError("--in-doubt and --state exclude each other")
    if state not in (None, *STATES):
        raise ConfigError(f"--state {str(state)[:40]}: expected one of {', '.join(STATES)}")
    return state or "in-doubt"


@app.command()
def show(
    txid: Txid,
    values: Annotated[bool, typer.Option("--values", help="The beginning of each message's value, too.")] = False,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP, as_json: output.Json = False,
) -> None:  # fmt: skip
    """Show what is known of one transaction: its outcome, or why it is in doubt, what to paste, what to do next.

    The keys of its messages say what it is about; --values shows the beginning of what they hold.

    [bold]Examples[/bold]

      txmq tx show TXID --values
      txmq tx show TXID --json | jq -r .outcome
    """
    with connected(bootstrap) as client:
        fields = client.transactions.show(txid)
        messages = message_rows(client, fields, with_values=values)
        resources, _ = ([], None) if "state" in fields else partly(client.transactions.resources)
        branches = tx_explain.branches_of(resources, txid)
    fields |= {"messages": messages} if messages else {}
    advice: dict[str, Any] = {}
    if branches:
        outcome, fields = fields["outcome"], fields | {"branches": branches}
        advice = {
            "sql": tx_explain.branches_sql(branches, outcome),
            "next": tx_explain.next_steps_of_branches(txid, branches, outcome),
        }
    elif fields.get("outcome") == "unknown" and "state" not in fields:
        advice = {"next": tx_explain.next_steps_unknown(txid)}
    elif "state" in fields:
        advice = {
            "why": tx_explain.why(fields), "sql": tx_explain.sql(fields), "next": tx_explain.next_steps(fields),
        }  # fmt: skip
    if as_json:
        output.print_json(fields | advice)
    else:
        _print(fields, advice)


def _print(fields: dict[str, Any], advice: dict[str, Any]) -> None:
    lists = {name: value for name, value in fields.items() if isinstance(value, list)}
    shown = {name: value for name, value in fields.items() if name not in lists}
    if "why" in advice:
        shown |= {"age": tx_explain.age(fields["age_ms"]), "why": advice["why"]}
    output.print_fields(f"transaction {fields['txid']}", shown)
    for name, rows in lists.items():
        columns = list(rows[0]) if rows else []
        if rows:
            output.print_table(name, columns, [[row.get(column) for column in columns] for row in rows])
    if advice.get("sql"):
        typer.echo("\nto paste:")
        for line in advice["sql"]:
            _print_sql(line)
    if advice.get("next"):
        typer.echo("\nwhat to do, safest first:")
        for number, line in enumerate(advice["next"], 1):
            _print_step(number, line)


def _print_sql(line: str) -> None:
    """A statement stays one line, which a terminal can select and a shell can grep; a comment is for people."""
    if line.startswith("-- "):
        output.print_paragraph(line.removeprefix("-- "), "  -- ")
    else:
        typer.echo(f"  {output.escaped(line)}")


def _print_step(number: int, line: str) -> None:
    """A sentence, and the command that ends it: on a terminal on a line of its own, as it can be copied."""
    sentence, is_command, command = line.partition(": txmq ")
    if is_command and output.line_width() is not None:
        output.print_paragraph(f"{sentence}:", "     ", f"  {number}. ")
        typer.echo(f"     txmq {output.escaped(command)}")
    else:
        output.print_paragraph(line, "     ", f"  {number}. ")


@app.command()
def commit(
    txid: Txid, reason: Reason, heuristic: Heuristic = False, yes: output.Yes = False,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP, as_json: output.Json = False,
) -> None:  # fmt: skip
    """Commit a prepared transaction in its database's or application's stead: its messages go out.

    If the rows are not there, readers act on something that never happened. See docs/how-to/in-doubt-at-3am.md.

    [bold]Examples[/bold]

      txmq tx commit TXID --heuristic --reason 'ada: row 42 is there'
    """
    _require(heuristic, "commit")
    output.confirm(
        yes, f"Commit {txid}? If its rows are NOT committed, its messages tell of something that never happened."
    )
    with connected(bootstrap) as client:
        lines = client.transactions.commit(txid, reason)
    parts = [line._asdict() for line in lines]
    output.report(
        {"txid": txid, "outcome": "committed", "parts": parts}, f"transaction {txid} is committed", as_json=as_json
    )


@app.command()
def rollback(
    txid: Txid, reason: Reason, heuristic: Heuristic = False, yes: output.Yes = False,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP, as_json: output.Json = False,
) -> None:  # fmt: skip
    """Roll a prepared transaction back in its database's or application's stead: its messages never go out.

    If the rows are there, or still come, no message reports them. See docs/how-to/in-doubt-at-3am.md.

    [bold]Examples[/bold]

      txmq tx rollback TXID --heuristic --reason 'ada: no marker, service removed'
    """
    _require(heuristic, "rollback")
    output.confirm(yes, f"Roll back {txid}? If its rows ARE committed, or commit later, no message will report them.")
    with connected(bootstrap) as client:
        client.transactions.rollback(txid, reason)
    output.report({"txid": txid, "outcome": "rolled-back"}, f"transaction {txid} is rolled back", as_json=as_json)


@app.command()
def complete(
    txid: Txid, reason: Reason,
    resource: Annotated[str, typer.Option("--resource", help="Name or uuid of the resource.", show_default=False)],
    heuristic: Annotated[
        str,
        typer.Option("--heuristic", metavar="commit|rollback|mixed|hazard", help="What became of its branch.",
                     show_default=False),
    ],
    yes: output.Yes = False,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP, as_json: output.Json = False,
) -> None:  # fmt: skip
    """Stop waiting for one branch of a committed transaction: its database is gone, or has decided otherwise.

    [bold]Examples[/bold]

      txmq tx complete TXID --resource orders-db --heuristic hazard \\
          --reason 'disk lost'
    """
    output.confirm(
        yes, f"Give up the branch of {txid} in {resource}? If it is prepared there, it keeps its locks for ever."
    )
    with connected(bootstrap) as client:
        client.transactions.complete(txid, resource, heuristic, reason)
    said = {"txid": txid, "resource": resource, "heuristic": heuristic}
    output.report(said, f"transaction {txid} no longer waits for {resource}", as_json=as_json)


@app.command("give-up")
def give_up(
    txid: Txid, reason: Reason,
    home: Annotated[
        str, typer.Option("--home", metavar="ID", help="Of the lost home, as txmq tx show has it.", show_default=False)
    ],
    yes: output.Yes = False,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP, as_json: output.Json = False,
) -> None:  # fmt: skip
    """Stop waiting for a home of a committed transaction, or of a part: its directory is lost for ever, with no copy.

    A home that a broker leads is given up only if it has ended its part already. A home that is only away, and comes
    back after this, rolls back what it had not placed: the transaction is torn. See docs/how-to/in-doubt-at-3am.md.

    [bold]Examples[/bold]

      txmq tx show TXID
      txmq tx give-up TXID --home 00000000000000b2 --reason 'ada: disk burnt'
    """
    output.confirm(yes, f"Give up home {home} for {txid}? Its messages there are lost, also if the home comes back.")
    with connected(bootstrap) as client:
        is_kept = client.transactions.give_up_home(txid, home, reason)
    output.report(
        {"txid": txid, "home": home, "heuristic": "hazard" if is_kept else None},
        f"transaction {txid} no longer waits for home {home}", as_json=as_json,
    )  # fmt: skip


@app.command()
def fence(
    txid: Txid,
    resource: Annotated[
        str | None,
        typer.Option(
            "--resource", help="Name or uuid of the database, for a user who may settle for it and nothing else.",
            show_default=False,
        ),
    ] = None,
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP, as_json: output.Json = False,
) -> None:  # fmt: skip
    """Tell what became of a transaction, for good: one the broker never saw is journaled as rolled back.

    After "rolled-back" a branch of that id which a database lists in XA RECOVER may be rolled back by hand.

    With --resource a user who may settle for that database (txmq acl add USER --may settle --resource UUID) does the
    same for the branch there, and for nothing else of another user's transaction: as txmq resolver does.

    [bold]Examples[/bold]

      txmq tx fence TXID
      txmq tx fence TXID --resource 0123456789abcdef0123456789abcdef
    """
    with connected(bootstrap) as client:
        try:
            word = client.transactions.fence(txid, resource).value
        except ForbiddenError as error:
            if resource is not None:
                raise
            raise ForbiddenError(f"{error}; who may settle for a database adds --resource UUID") from error
    open_still = f" yet, so nothing was fenced; why: txmq tx show {txid}" if word == "unknown" else ""
    where = "" if resource is None else f" in {resource}"
    said = {"txid": txid, "outcome": word} | ({} if resource is None else {"resource": resource})
    output.report(said, f"transaction {txid}{where}: {word}{open_still}", as_json=as_json)


@app.command()
def forget(
    txids: Annotated[list[str], typer.Argument(metavar="TXID...", help="Transaction ids.", show_default=False)],
    bootstrap: output.Bootstrap = output.DEFAULT_BOOTSTRAP,
    as_json: output.Json = False,
) -> None:
    """Drop the records of heuristic decisions, once their damage is repaired. One that is not kept stops no other.

    [bold]Examples[/bold]

      txmq tx list --state heuristic
      txmq tx forget TXID TXID
    """
    unknown: UnknownTransactionError | None = None
    with connected(bootstrap) as client:
        for txid in dict.fromkeys(txids):
            try:
                client.transactions.forget(txid)
            except UnknownTransactionError as error:
                unknown = unknown or error
            else:
                said = {"txid": txid, "forgotten": True}
                output.report(said, f"the heuristic outcome of {txid} is forgotten", as_json=as_json)
    if unknown is not None:
        raise unknown


def _require(heuristic: bool, verb: str) -> None:
    if not heuristic:
        raise ConfigError(
            f"tx {verb} decides without proof, which may tear rows and messages apart: say --heuristic if you mean it "
            "(a resolver settles with proof: txmq resolver)"
        )
