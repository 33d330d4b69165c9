"""All peers, in the order of the table."""

from __future__ import annotations

from bench.peers.jetstream import JetStream
from bench.peers.kafka import Kafka
from bench.peers.model import Peer
from bench.peers.own import Txmq
from bench.peers.rabbitmq import RabbitMQ
from bench.peers.redis_streams import RedisStreams
from bench.peers.rocketmq import RocketMQ

OWN = Txmq("txmq", "txmq", "synced", sync="always")
RABBITMQ = RabbitMQ("peer-rabbitmq", "RabbitMQ", "synced: quorum queue with confirm, classic queues with tx")
NATS_SYNCED = JetStream("peer-nats-sync", "NATS JetStream, sync always", "synced", sync_always=True)
NATS = JetStream("peer-nats", "NATS JetStream, default", "in memory, synced each two minutes", is_durable=False)
KAFKA_FLUSH = Kafka("peer-kafka-flush", "Kafka, flush each", "synced", flushes_each=True)
PEERS: tuple[Peer, ...] = (
    OWN,
    Txmq("txmq-interval", "txmq, sync = interval", "in memory, synced soon", is_durable=False, sync="interval"),
    RABBITMQ,
    NATS_SYNCED,
    NATS,
    KAFKA_FLUSH,
    Kafka("peer-kafka", "Kafka, default", "in memory, synced when the system likes", is_durable=False),
    RocketMQ("peer-rocketmq", "RocketMQ, sync flush", "synced; a transaction is one half message"),
    RedisStreams("peer-redis", "Redis Streams, sync always", "synced"),
)
