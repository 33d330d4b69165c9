"""Transcripts: requests in, answers out, played by the real core on a simulated disk. transcripts/README.md has the
language.

Invariants
    * Each answer that a connection gets is shown at the step after which it came: what is not in the transcript did
      not come.
    * A step is written the same way by whoever writes it, so a changed answer is a changed line.
    * What differs by clock or chance has a name: ``<tx:1.2>``, ``<now+500>``, ``<home>``, ``<uuid:name>``; any other
      32 hex digits are ``<hex:1>``, ``<hex:2>``, in the order of their first sight.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tools.images.node import Answer, Client, Node
from tools.images.requests import batch, part
from tools.simulated.clock import START_MS
from txmq.broker.commit.pipeline import APPLY_RETRY_S
from txmq.log import records
from txmq.model import Message
from txmq.protocol.grammar import VERBS
from txmq.protocol.transaction_bodies import DueHalf, encode_branch, split_halves

from .group_support import pass_time
from .support import node, restarted, stated

WIDTH = 120
GENERATIONS_NAMED = 10  # handed out since a start, which counts on from its time in ms
EITHER_WAY = "restart either way"
BRANCH = {"bqual": "b", "connection": 7, "wrote": True, "marker": True, "table": "t"}
_TOKEN = re.compile(r"'(?:[^'\\]|\\.)*'(?:\*\d+)?|\{[^}]*\}|\[[^\]]*\]|\S+")
_REQUEST = re.compile(r"(\w*)(>>?) (.*)")
_PART = re.compile(r"(\S+)/(\d+)((?: \w+=\S+)*):(.*)")
_TIME = re.compile(r"(?<!\d)1[67]\d{11}(?!\d)")
_HEX = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")


@dataclass(slots=True)
class Step:
    """One line that does something, with the lines that it brings; ``above`` are comments and empty lines."""

    text: str
    answers: list[str] = field(default_factory=list)
    above: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """As they stand in the file."""
        short = f"{self.text} => {self.answers[0]}" if len(self.answers) == 1 else ""
        if short and len(short) <= WIDTH:
            return [*self.above, short]
        return [*self.above, self.text, *(f"  {answer}" for answer in self.answers)]


@dataclass(slots=True)
class Scenario:
    """What follows a line ``## title``."""

    title: str
    steps: list[Step] = field(default_factory=list)
    below: list[str] = field(default_factory=list)
    file: list[Scenario] = field(default_factory=list, compare=False, repr=False)

    def lines(self) -> list[str]:
        """As they stand in the file."""
        return [f"## {self.title}", *(line for step in self.steps for line in step.lines()), *self.below]

    @property
    def lives(self) -> tuple[bool, ...]:
        """Whether its restarts come after a checkpoint, for each time that it is played."""
        return (False, True) if any(step.text == EITHER_WAY for step in self.steps) else (False,)


def read(path: Path) -> tuple[list[str], list[Scenario]]:
    """What stands at the head of a file, and its scenarios."""
    head: list[str] = []
    found: list[Scenario] = []
    above: list[str] = []
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("## "):
            (found[-1].below if found else head).extend(above)
            found.append(Scenario(line[3:], file=found))
            above = []
        elif not found or not line or line.startswith("#"):
            above.append(line)
        elif line.startswith("  "):
            found[-1].steps[-1].answers.append(line[2:])
        else:
            text, arrow, answer = line.partition(" => ")
            found[-1].steps.append(Step(text, [answer] if arrow else [], above))
            above = []
    (found[-1].below if found else head).extend(above)
    return head, found


def rewrite(path: Path, played: Scenario) -> None:
    """Put a scenario as it was played in the place of the one with its title."""
    head, found = read(path)
    lines = [line for one in found for line in (played if one.title == played.title else one).lines()]
    path.write_text("\n".join([*head, *lines]) + "\n", "utf-8")


def play(scenario: Scenario, *, after_checkpoint: bool = False) -> Scenario:
    """The scenario with the answers that came."""
    with pytest.MonkeyPatch.context() as limits:
        stage = _Stage(after_checkpoint, scenario.file, limits)
        steps = [Step(step.text, stage.do(step.text), step.above) for step in scenario.steps]
    return Scenario(scenario.title, steps, scenario.below)


class _Stage:
    """A broker and its connections by name; the last ones of a name are meant, the older ones still listen."""

    def __init__(self, after_checkpoint: bool, file: list[Scenario], limits: pytest.MonkeyPatch) -> None:
        self._after_checkpoint, self._file, self._limits = after_checkpoint, file, limits
        self._settings: dict[str, object] = {}
        self._node: Node | None = None
        self._is_first_life = True
        self._named: dict[str, Client] = {}
        self._connections: list[tuple[str, Client]] = []
        self._closed: list[Client] = []
        self._asked: dict[tuple[int, bytes], tuple[str, list[str]]] = {}  # what an answer is for, what of it is shown
        self._streamed: dict[str, list[bytes]] = {}
        self._hexes: list[str] = []

    @property
    def node(self) -> Node:
        if self._node is None:
            self._node = node(**self._settings)
        return self._node

    def do(self, text: str) -> list[str]:
        """One step; the lines that it brings."""
        request = _REQUEST.fullmatch(text)
        if request is not None:
            return self._request(*request.groups())
        name, _, words = text.partition(" ")
        command: Callable[..., list[str] | None] | None = getattr(self, f"_do_{name}", None)
        if command is None:
            raise ValueError(f"no step is called {name!r}: transcripts/README.md lists them")
        return [*(command(*words.split()) or ()), *self._arrivals()]

    # --- commands ---

    def _do_settings(self, *words: str) -> None:
        self._settings = {name: ast.literal_eval(value) for name, value in (word.split("=") for word in words)}

    def _do_limit(self, *words: str) -> None:
        for name, value in map(_pair, words):
            self._limits.setattr(f"txmq.broker.{name}", int(value))

    def _do_connect(self, *names: str) -> None:
        for name in names or [""]:
            self._connect(name)

    def _do_session(self, *names: str) -> None:
        for name in names or [""]:
            self._do_resume("new", name)

    def _do_resume(self, which: str, name: str = "") -> None:
        answer = self._connect(name).hello(which)
        if answer.code != 200:
            raise AssertionError(f"no session {which}: {answer.text}")

    def _do_begin(self, *title: str) -> None:
        (begun,) = (one for one in self._file if one.title == " ".join(title))
        for step in begun.steps:
            self.do(step.text)

    def _do_disconnect(self, name: str = "") -> None:
        client = self._named.pop(name)
        self._connections.remove((name, client))
        client.disconnect()

    def _do_advance(self, time: str) -> None:
        self.node.clock.advance(_ms(time) / 1000)
        self.node.core.tick(self.node.clock.now_ms())
        self.node.pump()

    def _do_pass(self, time: str) -> None:
        pass_time(self.node, _ms(time) / 1000)

    def _do_jump(self, time: str) -> None:
        self.node.clock.jump(_ms(time))

    def _do_pump(self) -> None:
        self.node.pump()

    def _do_flush(self) -> None:
        self.node.flush()

    def _do_checkpoint(self) -> None:
        self.node.checkpoint()

    def _do_hold(self, _checkpoint: str) -> None:
        self.node.hold_checkpoint()

    def _do_let(self, _go: str) -> None:
        self.node.let_go()

    def _do_force(self) -> None:
        self.node.force()

    def _do_retire(self) -> None:
        self.node.retire()

    def _do_restart(self, *either_way: str) -> None:
        if either_way and self._after_checkpoint:
            self.node.checkpoint()
        elif either_way:
            self.node.clock.advance(APPLY_RETRY_S)  # what a checkpoint takes: times are the same either way
        self._node, self._is_first_life = restarted(self.node), False
        self._named, self._connections = {}, []

    def _do_disk(self, state: str) -> None:
        self.node.context.disk_full = state == "full"

    def _do_show(self, *places: str) -> list[str]:
        if places == ("sessions",):
            return [self._named_text(" ".join(map(str, sorted(self.node.state.sessions)))) or "none"]
        if places == ("alarms",):
            return [self._named_text(_plain(alarm)) for alarm in self.node.context.alarms] or ["none"]
        return [" ".join(f"[{self._seen(*place.split('/'))}]" for place in places)]

    # --- requests ---

    def _connect(self, name: str) -> Client:
        made = self._named[name] = self.node.connect()
        self._connections.append((name, made))
        return made

    def _request(self, name: str, arrow: str, text: str) -> list[str]:
        if not name and name not in self._named and self._is_first_life:
            self._do_session()
        client = self._named.get(name) or self._connect(name)
        tokens = _TOKEN.findall(text)
        cut = tokens.index("|") if "|" in tokens else len(tokens)
        verb, opaque = VERBS.get(tokens[0].encode()), b"n%d" % (len(self._asked) + 1)
        words, body = self._written(tokens[:cut])
        if body or (verb is not None and verb.has_body):
            words.append(str(len(body)))
        client.send_bytes(" ".join(words).encode() + b" " + opaque + b"\r\n" + body)
        shown = " ".join(tokens[: min(cut, 1 + (len(verb.arguments) if verb else 0))])
        self._asked[id(client), opaque] = (f"{name}: {shown}" if name else shown), tokens[cut + 1 :]
        if arrow == ">>":
            return self._arrivals()
        self.node.pump()
        answer = client.received.pop(opaque, None)
        own = "(waits)" if answer is None else self._told(answer, id(client), opaque)
        return [own, *self._arrivals()]

    def _written(self, tokens: list[str]) -> tuple[list[str], bytes]:
        """The words of a request, and its body."""
        contents = {token: self._content(token) for token in tokens if token[0] in "'{["}
        rows = next((content for token, content in contents.items() if token[0] == "'"), b"")
        words = [word for token in tokens if token not in contents for word in self._resolve(token).split()]
        words = [f"offsets={len(rows)}" if word == "offsets=*" else word for word in words]
        body = b"".join(contents[token] for token in tokens if token in contents)
        for word in words:
            if word.startswith("tx="):
                self._streamed.setdefault(word[3:], []).append(body)
        return words, body

    def _arrivals(self) -> list[str]:
        found = []
        for name, client in self._connections:
            for opaque in list(client.received):
                told = self._told(client.received.pop(opaque), id(client), opaque)
                found.append(f"{self._asked[id(client), opaque][0]}: {told}")
            if client.client.closing and client not in self._closed:
                found.append(f"{name}: closed".removeprefix(": "))
                self._closed.append(client)
        return found

    def _content(self, token: str) -> bytes:
        if token[0] == "'":
            quoted, _, times = token.rpartition("'")
            return self._resolve(ast.literal_eval(quoted + "'")).encode("latin-1") * int(times[1:] or "1")
        inner = self._resolve(token[1:-1])
        if token[0] == "[":
            resource, uuid, *changes = inner.split()
            return encode_branch(resource, uuid, BRANCH | {k: json.loads(v) for k, v in map(_pair, changes)})
        named = _PART.fullmatch(inner)
        if named is None:
            return _batch(inner)
        topic, number, words, rest = named.groups()
        fields = dict(map(_pair, words.split()))
        return part(topic, int(number), _batch(rest), fields.get("keys", ""), int(fields.get("id", "0")))

    # --- names ---

    def _resolve(self, text: str) -> str:
        text = text.replace("<db>", "resource=db uuid=<uuid:1> table=t")
        text = re.sub(r"<streamed:([\d.]+)>", lambda found: self._streamed_words(self._txid(found[1])), text)
        text = re.sub(r"<tx:([\d.]+)>", lambda found: self._txid(found[1]), text)
        text = re.sub(r"<uuid:(\w+)>", lambda found: found[1].encode().hex().rjust(32, "0"), text)
        text = re.sub(r"<hex:(\d+)>", lambda found: self._hexes[int(found[1]) - 1], text)
        text = re.sub(r"<session:([\w.]+)>", lambda found: self.node.wish(found[1]), text)
        floor = self.node.state.saved.generation_floor
        text = re.sub(r"<generation\+(\d+)>", lambda found: str(floor + int(found[1])), text)
        now = self.node.clock.now_ms()
        text = re.sub(r"<now([+-]\d+)?>", lambda found: str(now + int(found[1] or "0")), text)
        identity = self.node.recovered.identity
        return text.replace("<cluster>", f"{identity.cluster:016x}").replace("<home>", f"{identity.node:016x}")

    def _txid(self, name: str) -> str:
        session, counter = map(int, name.split("."))
        return self.node.txid(session, counter)

    def _streamed_words(self, txid: str) -> str:
        return " ".join(f"{name}={number}" for name, number in stated(self._streamed[txid]).items())

    def _named_text(self, text: str) -> str:
        identity = self.node.recovered.identity
        place = f"{identity.cluster:016x}-{identity.node:016x}"
        text = re.sub(
            place + r"-([0-9a-f]+)-([0-9a-f]+)", lambda found: f"<tx:{int(found[1], 16)}.{int(found[2], 16)}>", text
        )
        text = _HEX.sub(lambda found: self._hex_name(found[0]), text)
        text = text.replace(place[:16], "<cluster>").replace(place[17:], "<home>")
        return _TIME.sub(lambda found: self._time_name(int(found[0])), text)

    def _hex_name(self, word: str) -> str:
        uuid = bytes.fromhex(word).lstrip(b"\0")
        if uuid.isalnum():
            return f"<uuid:{uuid.decode()}>"
        if word not in self._hexes:
            self._hexes.append(word)
        return f"<hex:{self._hexes.index(word) + 1}>"

    def _time_name(self, time_ms: int) -> str:
        count = time_ms - self.node.state.saved.generation_floor
        if 1 <= count < GENERATIONS_NAMED:
            return f"<generation+{count}>"
        late_ms = time_ms - self.node.clock.now_ms()
        return f"<now{late_ms:+}>" if late_ms else "<now>"

    # --- what is shown ---

    def _told(self, answer: Answer, client: int, opaque: bytes) -> str:
        asked, shown = self._asked[client, opaque]
        if answer.code == 200 and re.search(r"(^|: )get ", asked):
            return f"value {self._values(answer.body)}".rstrip()
        if answer.code == 200 and re.search(r"(^|: )checks ", asked):
            halves = [self._half(half) for half in split_halves(answer.body)]
            return self._named_text(" ".join(["200", *halves]))
        text = answer.text.rstrip("\n")
        if shown and answer.code == 200:
            text = _chosen(text, shown)
        return self._named_text(f"{answer.code} {' / '.join(text.splitlines())}".rstrip())

    def _seen(self, topic: str, number: str) -> str:
        partition = self.node.partition(topic, int(number))
        return " ".join(self._message(message) for message in self.node.messages(partition))

    def _values(self, batches: bytes | bytearray) -> str:
        found = []
        for raw in records.decode_raw(batches, "-", 0):
            found.append(f"@{raw.base_offset}")
            found += [self._message(message) for message in records.decode_batch(raw, "-", 0)]
        return " ".join(found)

    def _half(self, half: DueHalf) -> str:
        parts = [f"{{{topic}/{number}: {self._values(content)}}}" for topic, number, content in half.parts]
        return " ".join([half.txid, f"attempt {half.attempt} age {half.age_ms}", *parts])

    def _message(self, message: Message) -> str:
        value = (message.value or b"").decode("latin-1")
        if value.strip("\0") == "" and value:
            value = f"*{len(value)}"
        notes = [] if message.key == b"k" else [f"key={message.key.decode()}" if message.key is not None else "no key"]
        if message.timestamp_ms != START_MS:
            notes.append(f"time={self._time_name(message.timestamp_ms)}")
        return value + (f"({', '.join(notes)})" if notes else "")


def _pair(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return name, value


def _ms(time: str) -> int:
    unit = re.fullmatch(r"(-?[\d.]+)(ms|s|h)", time)
    if unit is None:
        raise ValueError(f"a time is written as 500ms, 1.5s or 24h: {time}")
    return round(float(unit[1]) * {"ms": 1, "s": 1000, "h": 3_600_000}[unit[2]])


def _batch(text: str) -> bytes:
    words, _, changes = text.partition(";")
    fields = dict(map(_pair, changes.split()))
    values = [bytes(int(word[1:])) if word[0] == "*" else word.encode() for word in words.split()]
    made = bytearray(
        batch(
            *values, producer=int(fields.get("producer", "-1")), epoch=int(fields.get("epoch", "0")),
            sequence=int(fields.get("sequence", "0")), time_ms=START_MS + int(fields.get("time", "0")),
        )
    )  # fmt: skip
    if "flip" in fields:
        made[int(fields["flip"])] ^= 1
    return bytes(made)


def _chosen(text: str, names: list[str]) -> str:
    if text[0] not in "{[":
        return "\n".join(line for line in text.splitlines() if line.split(" ", 1)[0] in names)
    top = json.loads(text)
    found = _kept(top, names) or {key: [] for key, value in top.items() if isinstance(value, list)}
    return _plain(found)[1:-1]


def _kept(value: Any, names: list[str]) -> Any:
    """What is left of a value: of dictionaries the keys that were named, at any depth."""
    if isinstance(value, list):
        return [kept for item in value if (kept := _kept(item, names))]
    if not isinstance(value, dict):
        return None
    found = {key: item if key in names else _kept(item, names) for key, item in value.items()}
    return {key: item for key, item in found.items() if key in names or item}


def _plain(value: Any) -> str:
    """JSON without its quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_plain(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_plain, value)) + "]"
    return value if isinstance(value, str) else json.dumps(value)
