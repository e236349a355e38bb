"""COCO: its folders, its zips, its categories, crowds and masks, and what is refused of it."""

from __future__ import annotations

import io
import json
import logging
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fastsiam.errors import DataError, NoSplitError
from fastsiam.evaluate.detection import open_detection
from fastsiam.evaluate.detection.coco import unpacked_runs
from fastsiam.evaluate.detection.masks import from_pixels, pixels
from tests.evaluate.detection.test_voc import same


def coco_zips(folder: Path, out: Path, *, deflated: bool = False) -> None:
    """Pack the images of each split, and the annotations of both, into zips."""
    out.mkdir(parents=True, exist_ok=True)
    kind = zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
    for name, below in (
        ("train2017.zip", "train2017"),
        ("val2017.zip", "val2017"),
        ("annotations_trainval2017.zip", "annotations"),
    ):
        with zipfile.ZipFile(out / name, "w", kind) as file:
            file.mkdir(below)
            for path in sorted((folder / below).iterdir()):
                file.write(path, f"{below}/{path.name}")


POLYGON = [[10.0, 5.0, 30.0, 5.0, 30.0, 25.0, 10.0, 25.0]]


def thing(number: int, image: int = 7, category: int = 3, **more: Any) -> dict[str, Any]:
    return {
        "id": number, "image_id": image, "category_id": category, "bbox": [10.0, 5.0, 20.0, 20.0],
        "area": 400.0, "iscrowd": 0, "segmentation": POLYGON,
    } | more  # fmt: skip


def table(*objects: dict[str, Any]) -> dict[str, Any]:
    """Return annotations of two images, 7 and 9."""
    images = [
        {"id": key, "file_name": f"{key:012d}.jpg", "height": 40, "width": 60} for key in (7, 9)
    ]
    categories = [{"id": 90, "name": "toothbrush"}, {"id": 3, "name": "car"}]
    return {"images": images, "annotations": list(objects), "categories": categories}


def write(folder: Path, content: object) -> Path:
    buffer = io.BytesIO()
    Image.new("RGB", (60, 40)).save(buffer, "JPEG")
    (folder / "val2017").mkdir(parents=True, exist_ok=True)
    for key in (7, 9):
        (folder / f"val2017/{key:012d}.jpg").write_bytes(buffer.getvalue())
    (folder / "annotations").mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "annotations/instances_val2017.json").write_text(text)
    return folder


def test_categories_are_numbered_and_boxes_have_corners(tmp_path: Path) -> None:
    runs = {"size": [40, 60], "counts": [100, 300, 2000]}
    crowd = thing(2, image=9, category=90, iscrowd=1, segmentation=runs, area=300)
    write(tmp_path, table(thing(1, image=9), crowd))
    opened = open_detection("coco", tmp_path, "val")
    assert opened.classes == ("car", "toothbrush")
    first, second = opened.pictures()
    assert (first.image_id, len(first), first.boxes.shape) == (7, 0, (0, 4))
    assert (second.image_id, second.file) == (9, "val2017/000000000009.jpg")
    assert second.boxes.tolist() == [[10, 5, 30, 25]] * 2 and second.labels.tolist() == [0, 1]
    assert second.crowd.tolist() == [False, True] and not second.difficult.any()
    assert second.areas.tolist() == [400, 300]
    polygons, counted = second.masks or ()
    assert isinstance(polygons, list) and polygons[0].tolist() == POLYGON[0] and counted == runs


def test_half_a_character_in_a_name_is_read(tmp_path: Path) -> None:
    """JSON may hold one, which UTF-8 does not encode."""
    annotations = table(thing(1))
    stamp = open_detection("coco", write(tmp_path, annotations), "val").stamp
    annotations["categories"][0]["name"] = "\ud800"
    opened = open_detection("coco", write(tmp_path, annotations), "val")
    assert "\ud800" in opened.classes and opened.stamp != stamp


def test_masks_become_pixels(tmp_path: Path, coco: None) -> None:
    covered = np.zeros((40, 60), bool)
    covered[5:25, 10:30] = True
    packed = from_pixels(covered)
    packed["counts"] = packed["counts"].decode()
    write(tmp_path, table(thing(1), thing(2, segmentation=packed)))
    for mask in open_detection("coco", tmp_path, "val").picture(0).masks or ():
        np.testing.assert_array_equal(pixels(mask, 40, 60), covered)


@pytest.mark.parametrize("seed", range(5))
def test_run_lengths_are_unpacked_as_coco_packs_them(seed: int, coco: None) -> None:
    generator = np.random.default_rng(seed)
    covered = generator.random((90, 70)) < (0.5, 0.01, 0.99, 0.0, 1.0)[seed]
    flat = np.concatenate([[False], covered.T.reshape(-1)])
    places = np.flatnonzero(flat[1:] != flat[:-1])
    expected = np.diff([0, *places, covered.size]).tolist()
    assert unpacked_runs(from_pixels(covered)["counts"].decode()) == expected


@pytest.mark.parametrize("deflated", [False, True])
def test_zips_are_read_in_place(deflated: bool, made: Path, tmp_path: Path) -> None:
    coco_zips(made / "coco", tmp_path, deflated=deflated)
    folders = open_detection("coco", made / "coco", "train")
    zips = open_detection("coco", tmp_path, "train")
    assert len(zips) == len(folders) == 12 and zips.classes == folders.classes
    for i in range(12):
        assert zips.read(i) == folders.read(i)
        assert same_but_masks(zips.picture(i), folders.picture(i))
    assert zips.stamp != folders.stamp
    assert len(open_detection("coco", tmp_path / "val2017.zip", "val")) == 6
    assert len(list(tmp_path.iterdir())) == 3  # nothing was unpacked


def same_but_masks(first: Any, second: Any) -> bool:
    from dataclasses import replace

    return same(replace(first, masks=None), replace(second, masks=None))


def test_objects_without_an_area_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As COCO's own annotation 918, of a box without height."""
    objects = [
        thing(918, bbox=[29.65, 38.33, 1.03, 0.0]), thing(2), thing(3, segmentation=[[1, 2, 3, 4]]),
        thing(4, segmentation=[]), thing(5, segmentation=[[1, 2, 3, 4], POLYGON[0]]),
    ]  # fmt: skip
    write(tmp_path, table(*objects))
    with caplog.at_level(logging.INFO):
        kept = open_detection("coco", tmp_path, "val").picture(0)
    assert len(kept) == 2 and len(kept.masks or ()) == 2
    assert "3 objects without an area are left out (the first is annotation 918)" in caplog.text


def test_without_masks_there_are_none(tmp_path: Path) -> None:
    plain = thing(1)
    del plain["segmentation"]
    del plain["iscrowd"]
    del plain["area"]
    write(tmp_path, table(plain))
    found = open_detection("coco", tmp_path, "val").picture(0)
    assert found.masks is None and found.areas.tolist() == [400]
    write(tmp_path, table(plain, thing(2)))
    with pytest.raises(DataError, match="annotation 1 has no mask, but others have"):
        open_detection("coco", tmp_path, "val")


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    content = table(thing(1), thing(2))
    change(content)
    return json.dumps(content)


def runs(counts: Any, size: tuple[int, int] = (40, 60)) -> str:
    mask = {"size": size, "counts": counts}
    return json.dumps(table(thing(1), thing(2, segmentation=mask)))


def boxed(*box: object) -> str:
    return json.dumps(table(thing(1), thing(2, bbox=list(box))))


def shaped(*polygons: object) -> str:
    return json.dumps(table(thing(1), thing(2, segmentation=list(polygons))))


BAD = {
    "no JSON": ("{", "no whole JSON"),
    "nested": ("[" * 100_000, "no whole JSON"),
    "a list": ("[]", "no list of images"),
    "no images": (changed(lambda t: t.pop("images")), "no list of images"),
    "objects": (changed(lambda t: t.update(annotations=[1])), "no list of annotations"),
    "no categories": (changed(lambda t: t.update(categories=[])), "categories are missing"),
    "categories": (changed(lambda t: t["categories"][0].pop("id")), "no id or name"),
    "one id": (changed(lambda t: t["categories"][0].update(id=3)), "share an id"),
    "unknown class": (
        json.dumps(table(thing(2, category=4))), "annotation 2 has the category 4"
    ),
    "odd class": (
        json.dumps(table(thing(2, category_id=[]))), r"annotation 2 has the category \[\]"
    ),
    "unknown image": (json.dumps(table(thing(2, image=5))), "annotation 2 is of the image 5"),
    "odd image": (json.dumps(table(thing(2, image_id=[]))), "annotation 2 is of the image"),
    "two images": (changed(lambda t: t["images"][0].update(id=9)), "two images have the id 9"),
    "image without id": (changed(lambda t: t["images"][0].pop("id")), "the id None"),
    "size": (changed(lambda t: t["images"][0].update(width=0)), "image 7 .* 0 x 40|40 x 0"),
    "odd size": (changed(lambda t: t["images"][0].update(width=1e400)), "image 7"),
    "path": (changed(lambda t: t["images"][0].update(file_name="../a.jpg")), "image 7 .*file name"),
    "no name": (changed(lambda t: t["images"][0].pop("file_name")), "image 7 .*file name"),
    "missing": (changed(lambda t: t["images"][0].update(file_name="a.jpg")), "a.jpg: not there"),
    "reversed": (boxed(10, 5, -3, 4), "annotation 2 has a box .* reversed"),
    "nan": (boxed(float("nan"), 5, 3, 4), "annotation 2 has a box .* not finite"),
    "infinite": (boxed(1, 5, float("inf"), 4), "annotation 2 has a box .* not finite"),
    "huge": (boxed(1, 5, 10**400, 4), "annotation 2 has no whole box"),
    "far outside": (boxed(1, 5, 1e300, 4), "annotation 2 has a box .* outside its image"),
    "outside": (boxed(61, 5, 3, 4), "annotation 2 has a box .* outside its image"),
    "three numbers": (boxed(1, 5, 3), "annotation 2 has no whole box"),
    "no numbers": (boxed(1, 5, 3, "x"), "annotation 2 has no whole box"),
    "area": (json.dumps(table(thing(2, area=-1))), "annotation 2 has the area -1"),
    "odd polygon": (shaped([1, 2, 3, 4, 5, 6, 7]), "annotation 2 has a broken mask"),
    "nested polygon": (shaped([[1, 2, 3, 4, 5, 6]]), "annotation 2 has a broken mask"),
    "polygon of nan": (shaped([1, 2, 3, 4, 5, float("nan")]), "annotation 2 has a broken mask"),
    "polygon outside": (shaped([1, 2, 3, 4, 5, 1e9]), "annotation 2 has a broken mask"),
    "text": (json.dumps(table(thing(2, segmentation="x"))), "annotation 2 has no mask"),
    "short runs": (runs([100, 300]), "annotation 2 .* do not fill"),
    "long runs": (runs([100, 300, 10**12]), "annotation 2 .* do not fill"),
    "negative runs": (runs([2500, -200, 100]), "annotation 2 .* do not fill"),
    "size of runs": (runs([2400], (60, 40)), "annotation 2 .* its size is"),
    "cut runs": (runs("h"), "annotation 2 has a broken mask"),
    "strange runs": (runs("\u20ac"), "annotation 2 has a broken mask"),
    "endless runs": (runs("h" * 100), "annotation 2 has a broken mask"),
    "no runs": (runs(None), "annotation 2 has a broken mask"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_one_line_names_the_file_and_the_object(case: str, tmp_path: Path) -> None:
    text, message = BAD[case]
    write(tmp_path, text)
    with pytest.raises(DataError, match=message) as caught:
        open_detection("coco", tmp_path, "val")
    assert "instances_val2017.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_missing_is_named(made: Path, tmp_path: Path) -> None:
    with pytest.raises(NoSplitError, match=r"looked for annotations/instances_train2017\.json"):
        open_detection("coco", tmp_path, "train")
    shutil.copytree(made / "coco/annotations", tmp_path / "annotations")
    with pytest.raises(NoSplitError, match=r"looked for train2017/ and train2017\.zip"):
        open_detection("coco", tmp_path, "train")


def test_damaged_zips_are_named(made: Path, tmp_path: Path) -> None:
    coco_zips(made / "coco", tmp_path)
    path = tmp_path / "val2017.zip"
    whole = path.read_bytes()
    opened = open_detection("coco", tmp_path, "val")
    place = whole.index(opened.read(2)) + 1000
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    damaged = open_detection("coco", tmp_path, "val")
    assert damaged.read(1) == opened.read(1)
    with pytest.raises(DataError, match=r"val2017\.zip: val2017/0+14\.jpg is damaged .*CRC"):
        damaged.read(2)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"val2017\.zip is no whole zip"):
        open_detection("coco", tmp_path, "val")
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"val2017\.zip"):
        open_detection("coco", tmp_path, "val")


def test_a_bomb_is_not_unpacked(made: Path, tmp_path: Path) -> None:
    """A zip that says little of how much is in it: no more is unpacked than it says."""
    coco_zips(made / "coco", tmp_path)
    name = "val2017/000000000012.jpg"
    with zipfile.ZipFile(tmp_path / "val2017.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for path in (made / "coco/val2017").iterdir():
            content = bytes(50 << 20) if path.name in name else path.read_bytes()
            file.writestr(f"val2017/{path.name}", content)
    whole = (tmp_path / "val2017.zip").read_bytes()
    size = (50 << 20).to_bytes(4, "little")
    (tmp_path / "val2017.zip").write_bytes(whole.replace(size, (1000).to_bytes(4, "little")))
    with pytest.raises(DataError, match=r"000000000012\.jpg is damaged"):
        open_detection("coco", tmp_path, "val").read(0)
    (tmp_path / "val2017.zip").write_bytes(whole.replace(size, b"\xff\xff\xff\x7f"))
    with pytest.raises(DataError, match="too large for what it is"):
        open_detection("coco", tmp_path, "val").read(0)
