"""Small runs from Python, and the sentence with which one is refused."""

from __future__ import annotations

import pytest

from fedjax_sim.errors import UserError

ONE = dict(
    model="mlp",
    model_options={"hidden": (5,)},
    devices="1",
    chunk="1",
    batch_size=4,
    lr=0.05,
    epochs=1.0,
)
HALF = dict(participation="0.5", **ONE)


def refused(make, *parts: str) -> str:
    with pytest.raises(UserError) as caught:
        make()
    text = str(caught.value)
    assert "\n" not in text and all(word in text for word in parts), text
    return text
