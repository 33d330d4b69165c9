"""The registry on ZooKeeper. ``session``: the port to an ensemble; ``kazoo_session`` (home of kazoo): a real one."""
