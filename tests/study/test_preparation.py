"""What is printed, and refused, before the first run of a study begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fastsiam.console import size
from fastsiam.errors import DataError
from fastsiam.methods import method_skeleton
from fastsiam.pipelines import open_store
from fastsiam.study.preparation import check
from fastsiam.study.runs import Run
from fastsiam.train.image_list import FILE, ImageList, names_of
from tests.study.tiny import tiny, tiny_runs


@pytest.fixture
def runs(images: Path, tmp_path: Path) -> list[Run]:
    """Runs on the images that are there, as many as the scale is for; none has begun."""
    store = open_store(images, "train")
    scale = replace(tiny(), images=len(store), classes=len(store.classes))
    return tiny_runs(images, tmp_path / "out", scale, seeds=2)


def begin(run: Run, names: list[str]) -> None:
    """Have a run that was begun on some images."""
    run.folder.mkdir(parents=True)
    (run.folder / FILE).write_bytes(ImageList(tuple(names)).to_bytes())


def test_runs_of_other_images_are_refused(images: Path, runs: list[Run]) -> None:
    names = names_of(open_store(images, "train"))
    begin(runs[0], names)
    begin(runs[1], [f"{name}.webp" for name in names])  # another container of as many
    check(runs)
    begin(runs[3], names[1:])
    with pytest.raises(
        DataError, match=f"{runs[3].name} was trained on other images than those of"
    ) as error:
        check(runs)
    assert "\n" not in str(error.value) and "choose another --out" in str(error.value)


def test_images_that_a_scale_is_not_for(runs: list[Run], capfd: pytest.CaptureFixture[str]) -> None:
    """Another number is said; other classes are refused, whose chance is another."""
    check(runs)
    assert "training images; --scale" not in capfd.readouterr().err
    check([replace(run, scale=replace(run.scale, images=10_000)) for run in runs])
    assert "training images; --scale cifar is for 10,000" in capfd.readouterr().err
    with pytest.raises(DataError, match=r"classes; --scale cifar is for .*, 100 classes"):
        check([replace(run, scale=replace(run.scale, classes=100)) for run in runs])


def test_the_room_that_checkpoints_take(
    runs: list[Run], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each run keeps the last checkpoint and the one before."""
    check(runs)
    methods = [method_skeleton(run.config.model, images=run.scale.images) for run in runs]
    states = sum(x.nbytes for method in methods for x in method.state_dict().values())
    momenta = sum(x.nbytes for m in methods for x in m.parameters() if x.requires_grad)
    said = f"checkpoints of 4 runs: up to {size(2 * (states + momenta))}; "
    assert capfd.readouterr().err.startswith(said)
    disk = type("Disk", (), {"free": 1000})
    monkeypatch.setattr("fastsiam.study.preparation.shutil.disk_usage", lambda _: disk)
    check(runs)
    assert "warning: checkpoints of 4 runs" in capfd.readouterr().err
