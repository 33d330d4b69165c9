"""The scripts: small, because most crash defects need three operations or fewer on a fresh disk (CrashMonkey)."""

from __future__ import annotations

from collections.abc import Callable

from txmq.broker.verbs.decide import reported

from .node import Node
from .script import Script

A, B, A1 = ("a", 0), ("b", 0), ("a", 1)


def puts(name: str) -> Script:
    """Puts to two partitions, one batch a group, and several."""
    script = Script(name).topic("a", partitions=2).put("a").put("a", 1, count=2)
    return script.together().put("a").put("a", 1).put("a", count=3).apart().put("a", 1)


def puts_over_a_restart(name: str) -> Script:
    """A killed process between puts of the same sequence."""
    return puts(name).restart().put("a").put("a", 1).do(Node.mark, "mark").restart().put("a")


def puts_around_checkpoints(name: str) -> Script:
    """Checkpoints between puts; the third one releases the first."""
    script = puts(name).checkpoint().put("a").checkpoint().put("a", 1).put("a")
    return script.checkpoint().put("a", 1)


def puts_beside_a_checkpoint(name: str) -> Script:
    """Groups are answered and written to their files between the sync of a checkpoint's files and its writing."""
    script = Script(name).topic("a", partitions=2).topic("b").put("a").prepare(1, A, B).put("b")
    script.do(Node.hold_checkpoint, "hold").put("a").put("a", 1).commit(1).stream(2, "b").do(Node.let_go, "let go")
    script.put("a").commit_stream(2, A).do(Node.hold_checkpoint, "hold").put("a", 1).local(3, A, B)
    return script.do(Node.let_go, "let go").checkpoint().put("b").restart().put("a")


def answers_before_partition_files(name: str) -> Script:
    """Groups are answered while a thread writes those before to the partition files; a checkpoint waits for it."""
    script = Script(name).topic("a", partitions=2, segment_size_bytes=4096).topic("b").put("a").put("b")
    script.do(Node.hold_apply, "hold").put("a", size=2500).local(1, A, A1, B).put("a", size=2500).prepare(2, A, B)
    script.commit(2).put("b").put("a", 1).do(Node.let_go, "let go")
    script.put("a").do(Node.hold_apply, "hold").local(3, A, B).do(Node.want_checkpoint, "want a checkpoint").put("a", 1)
    return script.restart().put("a").checkpoint().put("b")


def local_over_two_topics(name: str) -> Script:
    """Local transactions over two topics, alone and together with puts in one group."""
    script = Script(name).topic("a", partitions=2).topic("b").put("a").local(1, A, B)
    return script.together().put("a").local(2, A, A, B).put("b").local(3, B).apart().local(4, A1, B, count=3)


def local_with_restart_and_checkpoint(name: str) -> Script:
    """Outcomes survive in the checkpoint and after it."""
    script = Script(name).topic("a", partitions=2).topic("b").local(1, A, B).checkpoint().local(2, A, B).restart()
    return script.local(3, B, A1).checkpoint().put("a").local(4, A)


def streamed(name: str) -> Script:
    """Parts stream ahead, the commit brings another one."""
    script = Script(name).topic("a", partitions=2).topic("b").put("a")
    script.stream(1, "a").stream(1, "b", count=2).put("a").commit_stream(1).put("b")
    return script.stream(2, "a").together().put("a").commit_stream(2, A, B).put("a").apart().put("b")


def streamed_with_checkpoints(name: str) -> Script:
    """A checkpoint between the parts, one before the decision, one after."""
    script = Script(name).topic("a").topic("b").stream(1, "a").checkpoint().stream(1, "b").checkpoint()
    script.stream(1, "a").commit_stream(1, B).checkpoint().put("a")
    return script.stream(2, "b").checkpoint().put("b")


def prepared_after_streaming(name: str) -> Script:
    """What was streamed before a checkpoint is prepared after it, and lives through restarts."""
    script = Script(name).topic("a").topic("b").stream(1, "a").checkpoint().stream(1, "b")
    script.transactions[1].fate = "stream"
    script.prepare(1, A, streamed=True).checkpoint().put("a").checkpoint().restart()
    return script.put("a").commit(1).put("b")


def prepare_and_commit(name: str) -> Script:
    """Prepared, restarted, committed; others go on meanwhile."""
    script = Script(name).topic("a", partitions=2).topic("b").prepare(1, A, B).put("a").prepare(2, A1, keys="8")
    return script.commit(1).put("b").restart().put("a").commit(2).put("a", 1)


def prepare_and_roll_back(name: str) -> Script:
    """Rolled back: by the owner, by a fence, before it was seen."""
    script = Script(name).topic("a").topic("b").put("a").prepare(1, A, B, fate="rolled-back").put("a").rollback(1)
    return script.put("b").fence(2).rollback(3).restart().local(4, A, B).put("a")


def prepared_over_checkpoints(name: str) -> Script:
    """Payloads move to their own file, and stay while a kept checkpoint names them."""
    script = Script(name).topic("a").topic("b").prepare(1, A, B).prepare(2, B, keys="9", fate="prepared").checkpoint()
    script.put("a").checkpoint().commit(1).put("a").checkpoint().restart()
    return script.put("b").checkpoint().put("a").checkpoint()


def in_order(name: str) -> Script:
    """Commits that wait for earlier ones share the record of the one they waited for."""
    script = Script(name).topic("a").topic("b").prepare(1, A).prepare(2, A, B).put("a").together()
    return script.commit(1).commit(2).put("a").apart().put("b").checkpoint().put("b")


def topics_come_and_go(name: str) -> Script:
    """Created, altered, deleted with messages in them and a prepared transaction on the way."""
    script = Script(name).topic("a").put("a").topic("b", partitions=2).put("b").put("b", 1).alter("a", partitions=2)
    script.put("a", 1).prepare(1, ("b", 0), A, fate="prepared").delete("b").put("a").checkpoint()
    return script.topic("c").put("c").put("a").delete("c").restart().put("a").checkpoint()


def journal_files(name: str) -> Script:
    """The journal crosses files, with and without a prepared one, and recycles them after checkpoints."""
    script = Script(name).topic("a", partitions=2).topic("b")
    for number in range(3):
        script.put("a", size=2800).put("a", 1, size=3000).local(number + 1, A, B).put("b", size=2500)
        script.checkpoint().do(Node.mark, "mark")
    return script.put("a", size=2900).restart().put("b", size=2000).put("a", 1)


def segments_roll(name: str) -> Script:
    """Segments of 4 KiB roll inside a group, inside a transaction, and after a checkpoint."""
    script = Script(name, padding=900).topic("a", partitions=2, segment_size_bytes=4096).topic("b")
    script.put("a", size=2500).put("a", size=1200).put("a", size=1200).local(1, A, A, A, B).checkpoint()
    script.together().put("a", size=1500).put("a", size=1500).put("a", size=1500).apart()
    return script.prepare(2, A, A).restart().commit(2).put("a", size=900)


def _retention(name: str, policy: str) -> Script:
    script = Script(name).topic("a", segment_size_bytes=4096, retention_size_bytes=4096, retention_policy=policy)
    script.topic("b").put("a", size=3000).put("a", size=3000).put("b").put("a", size=3000).do(Node.retire, "retire")
    script.put("a", size=3000).put("b").checkpoint().put("a", size=3000).do(Node.retire, "retire").put("b")
    return script.restart().put("b").put("a", size=3000).checkpoint().do(Node.retire, "retire").put("b")


def retention_deletes(name: str) -> Script:
    """Old segments go."""
    return _retention(name, "delete")


def _expire(node: Node) -> None:
    node.clock.advance(61)
    node.retire()


def retention_empties(name: str) -> Script:
    """Retention by age takes the active segment; the next batch begins another."""
    script = Script(name).topic("a", retention_ms=60_000).topic("b").put("a").put("a").put("b").do(_expire, "expire")
    script.put("a").put("b").do(_expire, "expire").checkpoint().put("b").restart().put("a").checkpoint()
    return script.do(_expire, "expire").restart().put("a")


def retention_archives(name: str) -> Script:
    """Old segments move."""
    return _retention(name, "archive")


def synced_at_intervals(name: str) -> Script:
    """``sync = interval``: answers before the sync; prepares and decisions forced all the same."""
    script = Script(name, sync="interval").topic("a", partitions=2).topic("b").put("a").local(1, A, B).put("a")
    script.do(Node.force, "force").put("a", 1).local(2, A, B).prepare(3, A, B).put("b").commit(3).put("a")
    return script.do(Node.force, "force").checkpoint().put("a").local(4, A1).restart().put("b").do(Node.force, "force")


def decided(name: str) -> Script:
    """Decided, held, completed branch by branch; puts and local transactions queue after the hold."""
    script = Script(name).topic("a", partitions=2).topic("b").put("a").decide(1, A, B, branches=2).put("a")
    script.local(2, A, A1).complete(1).together().put("b").complete(1, 1).put("a").apart()
    return script.decide(3, A1).decide(4, A1, B).complete(4).put("a", 1).restart().complete(3).put("b")


def decided_around_checkpoints(name: str) -> Script:
    """Decisions and what they hold survive in checkpoints; parts were streamed before."""
    script = Script(name).topic("a", partitions=2).topic("b").stream(1, "a").checkpoint().put("a")
    script.decide(1, B, branches=2, streamed=True).local(2, A, A1).checkpoint().complete(1).put("b").checkpoint()
    return script.restart().put("a").complete(1, 1).checkpoint().put("a").restart().decide(3).complete(3)


def consumer_groups(name: str) -> Script:
    """Offsets are set, partitions handed out under new generations, topics with offsets deleted."""
    script = Script(name).topic("a", partitions=2).topic("b").put("a").group("reset", ["a", 0, 1], ["b", 0, 0])
    script.group("join").put("a").group("leave").group("reset", ["a", 0, 2]).checkpoint()
    script.group("join", member="n").group("leave", member="n").restart().group("join").group("leave").together()
    script.put("b").group("reset", ["b", 0, 1], ["a", 1, 0]).apart().checkpoint().put("a").group("join").group("leave")
    return script.restart().group("reset", ["a", 0, 3])


def batches_of_a_query(name: str) -> Script:
    """Parts of a batch, one decision for the winners, losers; a driver that dies and is fenced by the next."""
    script = Script(name).topic("a", partitions=2).topic("b").query("open", 1).put("a")
    script.write(1, A, B, epoch=1, batch=0).write(2, A, epoch=1, batch=0, task=1, fate="rolled-back")
    script.write(3, A, A1, epoch=1, batch=0, task=1, attempt=1).decide_batch(3, 1, epoch=1, batch=0).put("a")
    script.write(4, B, epoch=1, batch=1, fate="rolled-back").together().query("open", 2).put("b").apart()
    script.write(5, A1, B, epoch=2, batch=1).together().decide_batch(5, epoch=2, batch=1).put("a", 1).apart()
    script.write(6, A, epoch=2, batch=2, fate="rolled-back").query("abort", 2, batch=2).write(7, A, B, epoch=2, batch=3)
    return script.decide_batch(7, epoch=2, batch=3).put("b")


def batches_around_checkpoints(name: str) -> Script:
    """What a query has, and its parts, in checkpoints and after them; decided after a hold."""
    script = Script(name).topic("a", partitions=2).topic("b").query("open", 1).write(1, A, B, epoch=1, batch=0)
    script.checkpoint().write(2, A1, epoch=1, batch=0, task=1).checkpoint().decide(3, A).put("a")
    script.decide_batch(1, 2, epoch=1, batch=0).checkpoint().put("b").restart().complete(3).checkpoint().put("a")
    script.write(4, A, epoch=1, batch=1, fate="rolled-back").checkpoint().query("open", 2).restart()
    return script.write(5, A, B, epoch=2, batch=1).restart().decide_batch(5, epoch=2, batch=1).checkpoint().put("b")


def consumed_and_produced(name: str) -> Script:
    """Offsets saved by transactions: local, streamed, prepared, decided; a prepared one in between has a restart."""
    script = Script(name).topic("a").topic("b").group("join").put("a", count=9)
    script.consumes(1, 1).local(1, B).consumes(2, 2).prepare(2, B).put("b").commit(2)
    script.consumes(3, 3, "stream").stream(3, "b").commit_stream(3, B).restart()
    script.consumes(4, 4).prepare(4, B).restart().commit(4).together().consumes(5, 5).local(5, B).put("b").apart()
    return script.consumes(6, 6).decide(6, B).complete(6).consumes(7, 7, "prepared").prepare(7, B, fate="prepared")


def consumed_around_checkpoints(name: str) -> Script:
    """The same, with checkpoints where offsets are held."""
    script = Script(name).topic("a").topic("b").group("join").put("a", count=9).checkpoint()
    script.consumes(1, 1).prepare(1, B).checkpoint().commit(1).checkpoint().consumes(2, 2).decide(2, B, branches=2)
    script.complete(2).checkpoint().restart().complete(2, 1).consumes(3, 3, "rolled-back").prepare(
        3, B, fate="rolled-back"
    )
    return script.checkpoint().rollback(3).consumes(4, 4).local(4, B).checkpoint().restart().put("b")


def _report(script: Script, counter: int) -> Script:
    """The home that decided knows that a branch is placed."""

    def told(node: Node) -> None:
        node.disk.note(("reported", counter))
        reported(node.context, (1, counter))
        node.pump()

    return script.do(told, f"report {counter}")


def over_homes(name: str) -> Script:
    """Branches of another home's transactions, decisions that wait for their place after them, and some with homes."""
    script = Script(name).topic("a", partitions=2).topic("b").branch(1, A, B).put("b").local(2, A, A1, waits=True)
    script.put("a").commit(1).commit(2).put("a")
    _report(script, 1).local(3, B, homes=True).put("a").complete_home(3).local(4, A, homes=True)
    script.branch(5, A, held=True).put("b").commit(5).put("a").branch(6, B).decide(7, B, homes=True, waits=True)
    script.put("b").together().commit(6).commit(7).put("b", 0).apart().complete(7).restart().put("a")
    return _report(script, 5).put("a").complete_home(7).put("b")


def over_homes_around_checkpoints(name: str) -> Script:
    """The same in checkpoints and after them; offsets are saved at both homes."""
    script = Script(name).topic("a", partitions=2).topic("b").group("join").put("a", count=9).checkpoint()
    script.branch(1, B).checkpoint().consumes(2, 2).local(2, B, A1, homes=True, waits=True)
    script.checkpoint().restart().put("b").commit(1).commit(2).checkpoint().consumes(3, 3).branch(3, B, held=True)
    script.commit(3).checkpoint().restart().put("b").complete_home(2).checkpoint()
    return _report(script, 3).checkpoint().put("b").restart().put("b")


def tokens(name: str) -> Script:
    """A database's fencing tokens, alone and two in one group, over checkpoints and restarts."""
    script = Script(name).topic("a").draw(1).put("a").together().draw(2).draw(3).put("a").apart().restart().draw(4)
    return script.checkpoint().put("a").restart().draw(5).checkpoint().draw(6).restart().put("a")


def pages(name: str) -> Script:
    """Pages of an outbox, with and without messages, alone and in one group; one waits; over checkpoints."""
    script = Script(name).topic("a", partitions=2).topic("b").page(1, 0, A, B).put("a").page(2, 1).together()
    script.page(3, 2, A).page(4, 3, B).put("b").apart().branch(5, A).page(6, 4, A, A1, waits=True)
    script.checkpoint().restart().put("a").commit(5).commit(6).page(7, 6, B).checkpoint().page(8, 7, A).restart()
    return script.stream(9, "a").put("b").page(10, 8, B).checkpoint()


def everything(name: str) -> Script:
    """A little of all."""
    script = Script(name).topic("a", partitions=2, segment_size_bytes=4096).topic("b").put("a", size=2000)
    script.prepare(1, A, B).local(2, A, B).stream(3, "a", size=2000).checkpoint().put("b").commit_stream(3, A)
    script.restart().put("a", 1).commit(1).rollback(4).checkpoint().put("a", size=2500)
    return script.prepare(5, A1, fate="prepared").do(Node.mark, "mark").restart().put("b").checkpoint().put("a")


_WRITERS: tuple[Callable[[str], Script], ...] = (
    puts, puts_over_a_restart, puts_around_checkpoints, puts_beside_a_checkpoint, answers_before_partition_files,
    local_over_two_topics, local_with_restart_and_checkpoint,
    streamed, streamed_with_checkpoints, prepared_after_streaming, prepare_and_commit, prepare_and_roll_back,
    prepared_over_checkpoints, in_order, topics_come_and_go, journal_files, segments_roll, retention_deletes,
    retention_archives, retention_empties, synced_at_intervals, decided, decided_around_checkpoints, consumer_groups,
    batches_of_a_query, batches_around_checkpoints,
    consumed_and_produced, consumed_around_checkpoints, over_homes, over_homes_around_checkpoints, tokens, pages,
    everything,
)  # fmt: skip
SCRIPTS: dict[str, Script] = {writer.__name__: writer(writer.__name__) for writer in _WRITERS}
