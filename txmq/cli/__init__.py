"""The ``txmq`` command: one file per noun, ``main.py`` puts them together.

Modules here import typer and each other only; everything else is imported inside the commands, which keeps
``txmq --help`` under 0.3 s.
"""
