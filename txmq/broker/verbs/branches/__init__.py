"""Transactions over homes: parts that another home decides about, and decisions that other homes must hear of."""
