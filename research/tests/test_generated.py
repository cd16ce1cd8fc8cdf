"""What pages take from rows is what the rows say."""

import pytest

from research import generated


@pytest.mark.parametrize("page", generated.pages(), ids=lambda page: page.stem)
def test_generated_parts_of_pages_are_current(page):
    old = generated.parts.outdated(page, generated.filled(page.read_text("utf-8")))
    assert old is None, f"{old}: `make -C research generated` writes it"
