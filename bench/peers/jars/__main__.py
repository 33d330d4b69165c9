"""``python -m bench.peers.jars [kafka] [rocketmq]``: fetch their jars."""

import sys

from bench.peers.jars import main

sys.exit(main(sys.argv[1:]))
