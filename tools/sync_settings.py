"""The configuration of a binlog sync of the database ``shop``, between two servers of this machine."""

from __future__ import annotations


def sync_settings(name: str, bootstrap: str, source_port: int, target_port: int, **more: str) -> str:
    """The text of the file.

    Args:
        more: lines of a section, by its name.
    """
    sides = {
        "source": f'port = {source_port}\nuser = "root"\ntables = ["shop.*"]\n',
        "apply": f'port = {target_port}\nuser = "root"\n',
    }
    sections = [f"[{section}]\n{sides.get(section, '')}{more.get(section, '')}" for section in sides | more]
    return f'name = "{name}"\nbootstrap = "{bootstrap}"\n{"".join(sections)}'
