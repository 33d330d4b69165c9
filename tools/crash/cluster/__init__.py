"""The campaign of several brokers and their ZooKeeper ensemble: each is killed, paused and restarted in turn."""
