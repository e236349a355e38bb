"""Feature files and pictures of nearest neighbours."""

from __future__ import annotations

import csv
import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from fastsiam.config.evaluate import EvalConfig, FeaturesConfig, NeighboursConfig
from fastsiam.errors import BackendError, FastSiamError
from fastsiam.evaluate.feature_files import write_features, write_neighbours
from fastsiam.evaluate.features import concat_batches
from fastsiam.evaluate.subject import open_subject
from tests.conftest import write_data, write_images
from tests.processes import Forked, command, fastsiam
from tests.ranks import fastsiam_on_ranks
from tests.train.runs import CPU as HERE


def test_feature_files_have_features_and_names(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Existing files are kept unless ``--force`` is given, which is checked before reading data."""
    import pyarrow.parquet as pq

    out = tmp_path / "f.npy"
    config = FeaturesConfig(out=str(out), workers=0, feature_batch=7)
    for name in ("f.npy.csv", "f.npy"):
        (tmp_path / "f.npy.csv").unlink(missing_ok=True)
        (tmp_path / name).write_text("mine")
        with pytest.raises(FastSiamError, match=rf"{name} already exists: .* --force$"):
            write_features(run, replace(config, data=str(tmp_path / "none")), HERE)
        assert (tmp_path / name).read_text() == "mine"
    config = replace(config, force=True)
    assert write_features(run, config, HERE) == [out, tmp_path / "f.npy.csv"]
    subject = open_subject(run, EvalConfig(workers=0), HERE)
    with torch.no_grad():
        expected = torch.cat([subject.network(batch.image) for batch in subject.loaders()[0]])
    array = np.load(out)
    assert array.dtype == np.float32 and array.shape == (24, 32)
    np.testing.assert_allclose(array, expected.numpy(), rtol=1e-5, atol=1e-6)
    rows = table_of(out)
    assert [row["row"] for row in rows] == [str(i) for i in range(24)]
    assert rows[9] == {"row": "9", "name": "class1/001.jpg", "label": "1", "class": "class1"}
    monkeypatch.setattr("fastsiam.evaluate.feature_files._GROUP_ROWS", 10)
    config = replace(config, out=str(tmp_path / "f.parquet"))
    write_features(run, config, HERE)
    table = pq.read_table(config.out)
    assert table.column_names == ["name", "label", "class", "feature"]
    assert np.array_equal(np.array(table["feature"].to_pylist(), np.float32), array)
    assert table["name"][9].as_py() == "class1/001.jpg" and table["label"][9].as_py() == 1
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BackendError, match=r"f\.parquet needs pyarrow: pip install"):
        write_features(run, config, HERE)


def table_of(out: Path) -> list[dict[str, str]]:
    with out.with_name(f"{out.name}.csv").open() as file:
        return list(csv.DictReader(file))


def test_ranks_write_same_file_as_one_process(run: Path, tmp_path: Path) -> None:
    """This includes bad images: one in a batch, and all images of a batch on every rank."""
    folder = write_images(tmp_path / "own", classes=2, each=20)
    for bad in (0, 1, 2, 3, 6, 8, 9):
        (folder / f"class0/{bad:03d}.jpg").write_bytes(b"no image")
    flags = ["--data", str(folder), "--device", "cpu", "--workers", "0", "--feature-batch", "2"]
    flags += ["--bad-images", "replace", "--gpus"]
    one, several = tmp_path / "one.npy", tmp_path / "several.npy"
    result = fastsiam("features", str(run), "--out", str(one), *flags, "1")
    results = fastsiam_on_ranks(2, "features", str(run), "--out", str(several), *flags, "2")
    assert f"wrote {several}" in results[0].stdout and not results[1].stdout
    for stderr in (result.stderr, results[0].stderr):
        assert "33 rows of 40 images, features: 32\n" in stderr
    assert several.read_bytes() == one.read_bytes() and np.load(one).shape == (33, 32)
    assert table_of(several) == table_of(one)
    assert "class0/008.jpg" not in {row["name"] for row in table_of(one)}


@pytest.mark.parametrize("ending", [".npy", ".parquet"])
def test_ranks_without_readable_images_write_no_file(
    ending: str, run: Path, tmp_path: Path
) -> None:
    """All images are bad, but each rank finds fewer than the limit."""
    folder, out = write_images(tmp_path / "own", classes=1, each=6), tmp_path / f"f{ending}"
    for path in folder.glob("*/*"):
        path.write_bytes(b"no image")
    flags = ["--data", str(folder), "--device", "cpu", "--workers", "0", "--gpus", "2"]
    flags += ["--bad-images", "replace", "--feature-batch", "2", "--out", str(out)]
    results = fastsiam_on_ranks(2, "features", str(run), *flags, code=1)
    for one in results:
        assert "error: no image of" in one.stderr and "Traceback" not in one.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "counts"), [(["features", "--out", "f.npy"], "23 here, 24"), (["eval", "knn"], "35")]
)
def test_ranks_with_different_images_are_rejected(
    words: list[str], counts: str, run: Path, tmp_path: Path
) -> None:
    """Two machines have folders of the same name with different content."""
    for rank in "01":
        write_data(tmp_path / rank / "data")
    (tmp_path / "1" / "data" / "train" / "class1" / "003.jpg").unlink()

    def begin(*arguments: str, environment: dict[str, str]) -> Forked:
        return command(*arguments, environment=environment, folder=tmp_path / environment["RANK"])

    flags = ["--data", "data", "--device", "cpu", "--workers", "0", "--gpus", "2"]
    results = fastsiam_on_ranks(2, *words, str(run), *flags, code=1, begin=begin)
    assert (
        f"this rank finds different images than rank 0, or another order ({counts} "
        in results[1].stderr
    )


def test_projections_of_unlabelled_and_corrupt_images(run: Path, tmp_path: Path) -> None:
    """Names that are not UTF-8 are escaped."""
    folder, out = write_images(tmp_path / "own", classes=1, each=5) / "class0", tmp_path / "z.npy"
    (folder / "000.jpg").rename(folder / os.fsdecode(b"\xe9.jpg"))
    config = FeaturesConfig(
        out=str(out), data=str(folder), layer="projector", workers=0, feature_batch=2
    )
    for name in (out.name, "z.parquet"):
        write_features(run, replace(config, out=str(tmp_path / name)), HERE)
    assert np.load(out).shape == (5, 16)
    assert {(row["label"], row["class"]) for row in table_of(out)} == {("-1", "")}
    assert table_of(out)[-1]["name"] == r"\udce9.jpg"
    (folder / "003.jpg").write_bytes(b"no image")
    with pytest.raises(FastSiamError, match=r"cannot decode .*003\.jpg"):
        write_features(run, replace(config, out=str(tmp_path / "f.npy")), HERE)
    assert not list(tmp_path.glob("f.*"))


def test_image_is_not_its_own_neighbour(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a validation split they are the queries; an image is never its own neighbour."""
    grid = Mock(return_value=Image.new("RGB", (1, 1)))
    monkeypatch.setattr("fastsiam.evaluate.feature_files.picture_grid", grid)
    folder = write_images(tmp_path / "own", classes=3, each=4)
    config = NeighboursConfig(data=str(folder), images=12, k=3, workers=0)
    write_neighbours(run, config, HERE, out=tmp_path / "n.png")
    subject = open_subject(run, config, HERE)
    features, labels, _ = concat_batches(subject.extract(subject.loader("train"), "image"))
    cosine = torch.nn.functional.normalize(features) @ torch.nn.functional.normalize(features).T
    cosine.fill_diagonal_(-2)
    (rows,) = grid.call_args.args
    for query, row in enumerate(rows):
        best = cosine[query].topk(3)
        texts = [
            f"{value:.2f} class{labels[i]}"
            for value, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
        assert [text for _, text, _ in row] == [f"class{labels[query]}", *texts]
        assert [good for _, _, good in row[1:]] == (labels[best.indices] == labels[query]).tolist()
    config = replace(config, data=str(folder / "class0"), images=3, k=2)  # without labels
    write_neighbours(run, config, HERE, out=tmp_path / "n.png")
    (rows,) = grid.call_args.args
    assert [len(row) for row in rows] == [3, 3, 3]
    assert {good for row in rows for _, _, good in row} == {None}


def test_features_and_neighbours_commands(run: Path, tmp_path: Path) -> None:
    flags = ["--device", "cpu", "--workers", "0"]
    out = tmp_path / "f.npy"
    result = fastsiam("features", str(run), "--out", str(out), "--split", "val", *flags)
    assert result.stdout.split() == ["wrote", str(out), "wrote", f"{out}.csv"]
    assert np.load(out).shape == (12, 32)
    picture = tmp_path / "n.png"
    fastsiam("neighbours", str(run), "--out", str(picture), "--images", "2", *flags)
    assert Image.open(picture).size == (9 * 116 + 16, 2 * 134)
    bad = fastsiam("neighbours", str(run), "--out", str(tmp_path / "n.xyz"), *flags, code=2).stderr
    assert "has no extension of a picture format" in bad
