"""A password in a file: its owner's alone, one line, and in no error."""

from __future__ import annotations

from pathlib import Path

import pytest

from txmq.client.bootstrap import PASSWORD, of_environment, read_password
from txmq.errors import ConfigError


def written(tmp_path: Path, content: bytes, mode: int = 0o600) -> Path:
    path = tmp_path / "password"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("content", [b"pencil", b"pencil\n", b"pencil\r\nmore\n"])
@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_first_line_of_the_file_is_the_password(tmp_path: Path, content: bytes, mode: int) -> None:
    assert read_password(str(written(tmp_path, content, mode))) == "pencil"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777])
def test_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="chmod 600") as caught:
        read_password(str(written(tmp_path, b"pencil", mode)))
    assert "pencil" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\npencil", b"pencil\xff"])
def test_file_without_a_password_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"its first line is the password|cannot be read: no UTF-8") as caught:
        read_password(str(written(tmp_path, content)))
    assert "pencil" not in str(caught.value)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_password(str(tmp_path / "none"))


def test_password_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD, "pencil")
    assert of_environment() == "pencil"
    monkeypatch.delenv(PASSWORD)
    assert of_environment() == ""
