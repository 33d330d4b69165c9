"""``python -m txmq``: the ``txmq`` command of this interpreter."""

from __future__ import annotations

from txmq.cli.main import main

if __name__ == "__main__":
    main()
