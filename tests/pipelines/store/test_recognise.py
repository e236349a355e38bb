"""Which data set lies at a path, and the messages where it is no data set or several."""

from __future__ import annotations

from pathlib import Path

from fastsiam.pipelines.store import open_store
from tests.conftest import write_images
from tests.sources import WNIDS, jpeg, tar


def test_a_word_within_a_name_tells_no_split(tmp_path: Path) -> None:
    tar(tmp_path / "carnival.tar", [("a/0.jpg", jpeg(0))])
    (tmp_path / "._train.tar").write_bytes(b"made by another system")
    assert len(open_store(tmp_path, "train")) == 1


def test_kaggles_layout_and_other_names_of_splits(tmp_path: Path) -> None:
    for wnid in WNIDS:
        path = tmp_path / "kaggle" / "ILSVRC/Data/CLS-LOC/train" / wnid / "0.JPEG"
        path.parent.mkdir(parents=True)
        path.write_bytes(jpeg(0))
    assert open_store(tmp_path / "kaggle", "train").classes == WNIDS
    write_images(tmp_path / "mixed" / "Train", each=2)
    write_images(tmp_path / "mixed" / "Validation", each=1)
    assert len(open_store(tmp_path / "mixed", "train")) == 6
    assert len(open_store(tmp_path / "mixed", "val")) == 3
