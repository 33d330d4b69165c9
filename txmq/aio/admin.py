"""``client.topics``, ``client.groups``, ``client.transactions`` on an event loop."""

from __future__ import annotations

from txmq.aio.twin import Facade, twin
from txmq.client.admin import groups, transactions
from txmq.client.topics import Topics as SyncTopics


class Topics(Facade[SyncTopics]):
    """``client.topics``, as ``txmq.Client`` has it."""

    create = twin(SyncTopics.create)
    alter = twin(SyncTopics.alter)
    delete = twin(SyncTopics.delete)
    describe = twin(SyncTopics.describe)
    watermarks = twin(SyncTopics.watermarks)
    list = twin(SyncTopics.list)
    ensure = twin(SyncTopics.ensure)


class Groups(Facade[groups.Groups]):
    """``client.groups``, as ``txmq.Client`` has it."""

    list = twin(groups.Groups.list)
    describe = twin(groups.Groups.describe)
    reset = twin(groups.Groups.reset)
    delete = twin(groups.Groups.delete)


class Transactions(Facade[transactions.Transactions]):
    """``client.transactions``, as ``txmq.Client`` has it."""

    list = twin(transactions.Transactions.list)
    resources = twin(transactions.Transactions.resources)
    messages = twin(transactions.Transactions.messages)
    show = twin(transactions.Transactions.show)
    outcome = twin(transactions.Transactions.outcome)
    commit = twin(transactions.Transactions.commit)
    rollback = twin(transactions.Transactions.rollback)
    complete = twin(transactions.Transactions.complete)
    give_up_home = twin(transactions.Transactions.give_up_home)
    fence = twin(transactions.Transactions.fence)
    forget = twin(transactions.Transactions.forget)
