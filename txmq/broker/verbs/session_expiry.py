"""Sessions whose client is away, or is done with them: first they keep less, then they end.

```
 connection lost --REST_MS--> at rest: outcomes that the client called finished leave
                 --session_idle_ms_max--> ended: a request in its name is answered 410, and never executed
 closed by its client --> no connection speaks for it any more, and the sequences of its producer leave
                      --> ended at once if no transaction has an id of it, else as above
```

All is journaled. The time counts from the loss of the connection, or from the broker's start if that was later: the
journal does not say whether a session was resumed before the restart. A client that resumes it stops the time.

Invariants:
    * a session that is connected, or that owes something (prepared, or decided with an incomplete branch), never ends;
    * a tick touches the sessions whose time has come, SESSIONS_A_TICK at most.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from txmq.broker.context import Context
from txmq.broker.state.session import BrokerSession
from txmq.errors import OverloadedError
from txmq.redo import entries

REST_MS = 60_000
SESSION_IDLE_MS_MIN = 60_000  # a session younger than this is never ended to make room for another
SESSIONS_A_TICK = 100  # 10,000 in 5 s


class Away(NamedTuple):
    """A session since its connection was lost.

    Attributes:
        is_at_rest: the next step is its end.
    """

    session: BrokerSession
    gone_ms: int
    is_at_rest: bool

    @property
    def is_over(self) -> bool:
        """Whether it came back, or was ended to make room."""
        session = self.session
        return session.is_ended or session.bound is not None or session.gone_ms != self.gone_ms


def went_away(context: Context, session: BrokerSession) -> None:
    """Its connection was lost, or the broker was started."""
    context.sessions_away.add(session.gone_ms + REST_MS, Away(session, session.gone_ms, is_at_rest=False))


def tick(context: Context) -> None:
    """Time has passed."""
    if not context.disk_full:  # it writes, can wait, and frees no disk
        resting = [
            _take_step(context, away) for away in context.sessions_away.take_due(context.now_ms, SESSIONS_A_TICK)
        ]
        _rest(context, [session for session in resting if session is not None])


def _take_step(context: Context, away: Away) -> BrokerSession | None:
    """Do what is due for one session. Returns it if it keeps more than it needs."""
    session = away.session
    ends_ms = session.gone_ms + max(REST_MS, context.settings.session_idle_ms_max)
    if ends_ms > context.now_ms:
        context.sessions_away.add(ends_ms, away._replace(is_at_rest=True))
    elif session.owed:
        context.sessions_away.add(context.now_ms + REST_MS, away._replace(is_at_rest=True))
    else:
        end(context, session)
    return session if not away.is_at_rest and not session.is_ended and session.has_finished_outcomes else None


def _rest(context: Context, sessions: list[BrokerSession]) -> None:
    if sessions:
        numbers = [session.number for session in sessions]
        context.group.add_entry(entries.json_entry(entries.SESSIONS_AT_REST, {"sessions": numbers}))
        context.state.rest_sessions(numbers)


def make_room(context: Context, user: str, refusal: str, *, among: Container[int] | None = None) -> None:
    """End the session, of the user if one is named, that has been away longest and owes nothing.

    Later requests in its name are answered 410.

    Args:
        among: only one of these; None: of all.

    Raises:
        OverloadedError: there is none; the text is ``refusal``.
    """
    for session in context.state.sessions.values():
        is_idle = session.bound is None and not session.owed and user in ("", session.user)
        is_meant = among is None or session.number in among
        if is_idle and is_meant and context.now_ms - session.gone_ms >= SESSION_IDLE_MS_MIN:
            end(context, session)
            return
    raise OverloadedError(refusal)


def refuse_over_sequences(context: Context, session: BrokerSession) -> None:
    """Make room for a producer's first batch in a partition: sequences are kept as long as its session.

    Raises:
        OverloadedError: no session that has sequences can be ended.
    """
    state, most = context.state, context.settings.sequences_max
    user, own_max = session.user, max(1, most // 2)
    if user and state.principals.sequences.get(user, 0) >= own_max:
        refusal = f"{user}'s producers write to {own_max} partitions, half of sequences_max at most"
        make_room(
            context, user, f"{refusal}, and none of their sessions can be ended", among=state.sequences.produced_in
        )
    elif state.sequences.count >= most:
        refusal = f"sequences_max {most} sequences of producers are kept and no session can be ended"
        make_room(context, "", refusal, among=state.sequences.produced_in)


def close(context: Context, session: BrokerSession, counter: int) -> None:
    """Its client is done with it; no connection is bound to it.

    Args:
        counter: of the newest transaction that the client has given an id; 0: none. A database may know one that this
            broker has never heard of, and asks for it.
    """
    if counter == 0 and session.tells_nothing:
        end(context, session)
        return
    context.group.add_entry(entries.encode_session_ended(session.number, entries.SESSION_CLOSED))
    context.state.close_session(session.number)


def end(context: Context, session: BrokerSession) -> None:
    """It is over: its number is never used again."""
    context.group.add_entry(entries.encode_session_ended(session.number))
    context.state.end_session(session.number)
