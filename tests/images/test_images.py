"""Every crash image of the scripts, opened and asked again. A failing one names itself and the command to repeat it."""

from __future__ import annotations

import pytest

from tools.images.cases import check_script
from tools.images.scripts import SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_image_keeps_what_was_told_and_answers_again_alike(name: str) -> None:
    count = check_script(name)
    print(f"{count} images of {name}")
    assert count > 150
