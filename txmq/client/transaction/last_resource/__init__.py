"""The ending of a block with a last resource: its database decides, and may keep its messages for a while."""
