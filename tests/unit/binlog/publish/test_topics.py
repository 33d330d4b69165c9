"""Topics of tables, and what stays in one partition."""

from __future__ import annotations

import pytest

from txmq.binlog.config import PublishSettings, topic_of
from txmq.binlog.decoded_changes import TableName
from txmq.binlog.errors import BinlogError
from txmq.binlog.publish.topics import Topics, selector_of
from txmq.client.partitioner import KeyHashSelector
from txmq.errors import ConfigError

ORDERS, STOCK = TableName("shop", "orders"), TableName("shop", "stock")
TOPICS = ["s.shop", "s.shop.orders", "s.shop.stock", "s.shop2.orders", "s.crm.orders", "sxshop.a", "s.parked"]


def topics(by: str = "key", pattern: str = "{name}.{database}.{table}") -> tuple[Topics, list[str]]:
    """Topics of eight partitions, and those that were made."""
    made: list[str] = []

    def make(topic: str) -> int:
        made.append(topic)
        return 8

    return Topics(PublishSettings(by=by, topic=pattern), "s", make, lambda: TOPICS), made


def test_a_topic_is_made_once_and_named_after_the_pattern() -> None:
    found, made = topics()
    assert found.place(ORDERS, "0-1-1").topic == "s.shop.orders"
    assert found.place(ORDERS, "0-1-2") is found.place(ORDERS, "0-1-3")
    assert found.partitions("s.shop.orders") == 8
    assert made == ["s.shop.orders"]


def test_tables_of_a_database_may_share_a_topic() -> None:
    found, made = topics(pattern="{name}.{database}")
    assert found.place(ORDERS, "g").topic == found.place(STOCK, "g").topic == "s.shop"
    assert made == ["s.shop"]


@pytest.mark.parametrize(
    ("table", "topic"),
    [
        (TableName("shop", "customer$"), "s.shop.customer_u24_"),
        (TableName("my shop", "größe"), "s.my_u20_shop.gr_uf6__udf_e"),
        (TableName("a.b", "c"), "s.a_u2e_b.c"),
    ],
)
def test_characters_that_no_topic_may_have_are_escaped(table: TableName, topic: str) -> None:
    assert topic_of("{name}.{database}.{table}", "s", table) == topic


def test_two_tables_of_one_escaped_name_are_refused() -> None:
    found, _ = topics()
    found.place(TableName("shop", "a$"), "g")
    with pytest.raises(BinlogError, match=r"shop.a_u24_ and shop.a\$ would share"):
        found.place(TableName("shop", "a_u24_"), "g")


def test_a_topic_with_too_long_a_name_is_refused() -> None:
    found, _ = topics()
    with pytest.raises(BinlogError, match=r"publish\.topic"):
        found.place(TableName("d" * 64, "é" * 64), "g")


def test_by_key_the_partition_is_that_of_every_producer() -> None:
    place = topics()[0].place(ORDERS, "g")
    keys = [b"[%d]" % number for number in range(50)]
    assert [place.partition_of(key) for key in keys] == [KeyHashSelector().partition_of(key, 8) for key in keys]
    assert len({place.partition_of(key) for key in keys}) == 8


def test_keys_that_are_one_to_a_collation_have_one_partition() -> None:
    place = topics()[0].place(ORDERS, "g")
    for keys in (
        ['["K38",7]', '["k38 ",7]', '["k 38",7]', '["Ḱ38",7]'],
        ['["größe"]', '["GRÖSSE"]', '["gro\u0308ße"]'],
    ):
        assert len({place.partition_of(key.encode()) for key in keys}) == 1, keys
    assert len({place.partition_of(b'["k%d"]' % number) for number in range(50)}) == 8


@pytest.mark.parametrize("by", ["table", "transaction"])
def test_by_table_or_transaction_rows_have_one_partition(by: str) -> None:
    found, _ = topics(by, "{database}")
    of_orders = [found.place(ORDERS, f"0-1-{number}").partition_of(b"%d" % number) for number in range(20)]
    of_stock = [found.place(STOCK, f"0-1-{number}").partition_of(b"%d" % number) for number in range(20)]
    if by == "table":
        assert (len(set(of_orders)), len(set(of_stock))) == (1, 1)
        tables = [TableName("shop", f"t{number}") for number in range(20)]
        assert len({found.place(table, "g").partition_of(b"") for table in tables}) > 3
    else:
        assert of_orders == of_stock
        assert len(set(of_orders)) > 3


def test_an_unknown_selector_is_refused() -> None:
    with pytest.raises(ConfigError, match="key, table or transaction"):
        selector_of("row")


@pytest.mark.parametrize(
    ("pattern", "topics_of_shop"),
    [("{name}.{database}.{table}", ["s.shop.orders", "s.shop.stock"]), ("{name}.{database}", ["s.shop"])],
)
def test_a_statement_about_a_database_concerns_its_topics(pattern: str, topics_of_shop: list[str]) -> None:
    found, _ = topics(pattern=pattern)
    everything = TableName("shop", "")
    assert found.concerned([everything], "g") == dict.fromkeys(topics_of_shop, everything)
    assert found.concerned([TableName("none", "")], "g") == {}
