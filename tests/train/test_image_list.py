"""The list of image names that a run keeps, independent of the container."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fastsiam.train.image_list import FILE, ImageList, fingerprint, with_replacements

NAMES = st.lists(st.sampled_from("abcd"), max_size=8)  # includes names that several images share


@given(then=NAMES, now=NAMES)
def test_images_are_matched_by_name(then: list[str], now: list[str]) -> None:
    """Images with the same name keep their order; a missing image is replaced by the next one."""
    places = ImageList(tuple(then)).positions_in(now)
    for name in "abcd":
        old = places[[at for at, other in enumerate(then) if other == name]].tolist()
        new = [at for at, other in enumerate(now) if other == name]
        assert old == (new + [-1] * len(old))[: len(old)]
    if (places >= 0).any():
        replaced = with_replacements(places)
        following = [*places, *places]
        for at, index in enumerate(replaced):
            assert index == next(place for place in following[at:] if place >= 0)


def test_image_list_round_trips(tmp_path: Path) -> None:
    assert ImageList.load(tmp_path) is None
    blocks = np.array([0, 0, 1], np.int32)
    names = ("a/\udcff.jpg", "b/ä\n.jpg", "c")
    odd = ImageList(names, accepted=fingerprint(["x"]), blocks=blocks)
    (tmp_path / FILE).write_bytes(odd.to_bytes())
    copy = ImageList.load(tmp_path)
    assert copy is not None and (copy.names, copy.accepted) == (odd.names, odd.accepted)
    assert copy.blocks is not None and copy.blocks.tolist() == blocks.tolist()
