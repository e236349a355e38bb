"""Conversion of data sets: splits, samples and parts, with the same images afterwards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastsiam import demo
from fastsiam.config import ConvertConfig
from fastsiam.console import Console
from fastsiam.errors import DataError
from fastsiam.pipelines.convert import BadImagesError, convert, default_output
from fastsiam.pipelines.store import BetonStore, FolderStore, open_store
from fastsiam.train.image_list import names_of
from tests.configs import RecordingConsole
from tests.conftest import write_images
from tests.conversions import assert_same_images, find_problems, run
from tests.processes import fastsiam, python
from tests.sources import VAL_WNIDS, WNIDS, encoded, imagenet, jpeg, picture, rotated_jpeg, tar
from tests.tiers import rest_slow


def test_folder_with_two_splits_is_converted(images: Path, tmp_path: Path) -> None:
    train, val = run("folder", images, tmp_path / "out")
    assert [train.path.name, val.path.name] == ["train.beton", "val.beton"]
    for split in ("train", "val"):
        assert_same_images(open_store(tmp_path / "out", split), open_store(images, split))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["files"]["train.beton"] == train.about
    assert manifest["classes"] == ["class0", "class1", "class2"]
    count = len(open_store(images, "train"))
    about = train.about
    assert about["images"] == count and about["stored"] == {"unchanged": count}
    assert about["source"] == str(images / "train") and about["left_out"] == []
    assert sum(about["shorter_sides"].values()) == count
    assert sum(block["images"] for block in about["blocks"]) == count
    assert about["bytes"] == FolderStore(images / "train").sizes().sum()
    assert not list((tmp_path / "out").glob("*.partial")) + list((tmp_path / "out").glob("*.jour*"))
    assert find_problems(tmp_path / "out") == []


def test_default_output_is_next_to_source(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the source is named. So ``--data`` with its folder still means the originals."""
    monkeypatch.chdir(images)
    for source in (str(images), ".", "train/..", f"{images}/"):
        conversions = convert("folder", ConvertConfig(source=source, limit=3), Console(quiet=True))
        assert {file.path.parent.resolve() for file in conversions} == {tmp_path / "data-beton"}
        assert [file.existed for file in conversions] == [source != str(images)] * 2
    assert len(open_store(images, "train")) == 24
    archive = tar(tmp_path / "my.shards.tar", [("a/0.jpg", jpeg(0))])
    (conversion,) = convert("folder", ConvertConfig(source=str(archive)), Console(quiet=True))
    assert conversion.path == tmp_path / "my-beton" / "train.beton"
    with pytest.raises(DataError, match="next to /; choose a folder with --out"):
        default_output(Path("/"))


def test_limit_keeps_class_balance_and_depends_on_seed(tmp_path: Path) -> None:
    write_images(tmp_path / "images", classes=2, each=30)
    write_images(tmp_path / "more", classes=1, each=40)
    shutil.move(tmp_path / "more" / "class0", tmp_path / "images" / "class9")
    names: list[list[str]] = []
    for seed in (0, 1):
        out = tmp_path / f"out{len(names)}"
        (conversion,) = run("folder", tmp_path / "images", out, limit=20, seed=seed)
        store = BetonStore(conversion.path)
        assert np.bincount(store.labels).tolist() == [6, 6, 8]
        names.append(names_of(store))
    assert names[0] != names[1] and names[0] == sorted(names[0])


def test_part_may_have_no_images(tmp_path: Path) -> None:
    """If the split has too few, or all are bad. An empty part belongs to the data set as well."""
    train = write_images(tmp_path / "images" / "train", classes=2, each=2)
    write_images(tmp_path / "images" / "val", classes=1, each=1)
    for number in range(2):
        (train / "class0" / f"00{number}.jpg").write_bytes(b"")
    out = tmp_path / "parts"
    with pytest.raises(BadImagesError, match=r"2 of 2 images .* are bad; .* --skip-bad"):
        run("folder", tmp_path / "images", out, part="1/2")
    for number in (1, 2, 1):
        run("folder", tmp_path / "images", out, part=f"{number}/2", skip_bad=True)
    store = open_store(out, "train")
    assert names_of(store) == ["class1/000.jpg", "class1/001.jpg"]
    assert store.classes == ("class0", "class1") and len(open_store(out, "val")) == 1
    assert find_problems(out) == []
    run("folder", out, tmp_path / "whole")
    assert_same_images(open_store(tmp_path / "whole", "train"), store)
    for empty in ("train-00001", "val-00002"):
        with pytest.raises(DataError, match=f"{empty}-of-00002.beton holds no images"):
            open_store(out / f"{empty}-of-00002.beton", "train")


def test_parts_form_one_data_set(images: Path, tmp_path: Path) -> None:
    """As converted by a SLURM array; then merged into one file."""
    source, out = images / "train", tmp_path / "parts"
    for number in (2, 1):
        run("folder", source, out, part=f"{number}/3")
    with pytest.raises(DataError, match="has 2 of 3 parts of its train images; missing: 3"):
        open_store(out, "train")
    run("folder", source, out, part="3/3", max_side=10)
    odd, first = (out / f"train-0000{number}-of-00003.beton" for number in (3, 1))
    message = f"{odd} and {first} were converted from different images or with different options"
    with pytest.raises(DataError, match=message):
        open_store(out, "train")
    assert find_problems(out)[0] == f"{message}: convert one of them again"
    odd.unlink()
    for part in ("3/3", "03/03"):
        assert all(
            file.existed == (part != "3/3") for file in run("folder", source, out, part=part)
        )
    assert find_problems(out) == []
    with pytest.raises(DataError, match=r"of-00003\.beton is a part of another conversion and"):
        run("folder", source, out, part="1/2")
    run("folder", out, tmp_path / "merged")
    run("folder", source, tmp_path / "whole")
    with pytest.raises(DataError, match=r"train\.beton exists, and pipelines would read it"):
        run("folder", source, tmp_path / "whole", part="1/3")
    parts, merged, unsplit = (
        open_store(tmp_path / n, "train") for n in ("parts", "merged", "whole")
    )
    for store in (parts, merged):
        assert_same_images(store, unsplit)
        assert store.name(3) == unsplit.name(3)
    (out / "train-00002-of-00003.beton").unlink()
    assert "has 2 of 3 parts of its train images; missing: 2" in find_problems(out)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"part": "0/8"}, "part must be a part such as 2/8"),
        ({"workers": 0}, "workers must be -1 or at least 1"),
        ({"scheduler": "tcp://x:1"}, "--scheduler needs --parts: pass the number"),
        ({"parts": 3, "part": "1/3"}, "choose one of --part and --parts"),
    ],
)
def test_invalid_settings_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConvertConfig(**options)


@pytest.mark.alone
@pytest.mark.parametrize("count", rest_slow([25_000, 100_000]))
def test_memory_is_bounded_for_large_data(count: int, tmp_path: Path) -> None:
    """Parent and worker need less memory per image than its bytes, without the mapped tar."""
    few, many = (tmp_path / name / "t.tar" for name in ("few", "many"))
    before, after = peaks_of_images(5_000, few), peaks_of_images(count, many)
    mapped = many.stat().st_size - few.stat().st_size
    more = count - 5_000
    parent, worker = (
        (end - start - mapped) / more for start, end in zip(before, after, strict=True)
    )
    assert parent < 1024 and worker < 512
    assert max(after) < 400_000 * 1024  # with 100,000 images, the mapped tar is 154,000 kB


def peaks_of_images(count: int, path: Path) -> tuple[int, ...]:
    """Convert small images from a tar; return the peak memory of parent and worker in bytes."""
    data = [jpeg(i) for i in range(50)]
    tar(path, [(f"c{i % 7}/{i:06d}.jpg", data[i % 50]) for i in range(count)])
    script = (
        "import resource, sys; from fastsiam import cli\n"
        "sys.argv[1:] = ['convert', 'folder', '--workers', '1', *sys.argv[1:]]\n"
        "cli.app(standalone_mode=False)\n"
        "lines = open('/proc/self/status').read().splitlines()\n"
        "print(*(line.split()[1] for line in lines if line.startswith('VmHWM')))\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    result = python(script, "--source", path, "--out", path.with_name("out"))
    assert result.returncode == 0, result.stderr
    assert f"{count:,} images of 7 classes" in result.stdout
    return tuple(1024 * int(kilobytes) for kilobytes in result.stdout.split()[-2:])


def test_lossy_image_rules_are_reported_before_conversion(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a.jpg").write_bytes(rotated_jpeg(0))
    (folder / "b.png").write_bytes(encoded(picture(1).convert("RGBA"), "PNG"))

    def messages_of(name: str, **options: Any) -> str:
        console = RecordingConsole()
        out = str(tmp_path / name)
        convert("folder", ConvertConfig(source=str(folder), out=out, **options), console)
        return "\n".join(console.lines)

    text = messages_of("plain", quality=90)
    assert "1 of 2 sampled images have an EXIF orientation, which is ignored" in text
    assert "encoded as JPEGs of quality 90, which loses detail; --raw stores pixels instead" in text
    assert "loses detail" not in messages_of("raw", raw=True)
    assert messages_of("second", part="2/2") == ""


def test_imagenet_archives_are_converted_without_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without options: found in the data root, converted next to it and read from there."""
    root, out = tmp_path / "my data", tmp_path / "my data-beton"
    monkeypatch.setenv("FASTSIAM_DATA", str(root))
    imagenet(root)
    before = {path.name for path in root.iterdir()}
    result = fastsiam("convert", "imagenet")
    assert "train.beton: 9 images of 3 classes" in result.stdout
    assert result.stdout.endswith(f"fastsiam convert verify '{out}'; use it with: --data '{out}'\n")
    assert {path.name for path in out.iterdir()} == {"train.beton", "val.beton", "manifest.json"}
    part = fastsiam("convert", "imagenet", "--part", "1/2", "--out", str(tmp_path / "parts"))
    assert "; when all parts are there, check them with: fastsiam convert verify " in part.stdout
    assert {path.name for path in root.iterdir() if path.name[0] != "."} == before
    train, val = open_store(out, "train"), open_store(out, "val")
    assert isinstance(train, BetonStore) and train.classes == val.classes == WNIDS
    assert [val.classes[label] for label in val.labels] == list(VAL_WNIDS)
    again = fastsiam("convert", "imagenet")
    files = f"`rm '{out}/train.beton' '{out}/val.beton'` first, or choose another --out\n"
    assert again.stdout.startswith(f"already exists: {out}/train.beton: 9 images of 3 classes, ")
    assert again.stdout.endswith(f"nothing to do; to convert again, run {files}")
    assert ": intact; " in fastsiam("convert", "verify", str(out), "--decode").stdout


def test_demo_images_are_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, each in (("TRAIN", 2), ("VAL", 1)):
        monkeypatch.setattr(demo, name, each)
    demo.convert_demo(ConvertConfig(out=str(tmp_path / "demo")))
    assert "train.beton: 20 images of 10 classes" in capfd.readouterr().out
    assert len(open_store(tmp_path / "demo", "val")) == 10
    result = fastsiam("convert", "demo", "--source", str(tmp_path), code=1)
    assert result.stderr == "error: the demo generates its own images; leave out --source\n"
    result = fastsiam("convert", "demo", environment={"FASTSIAM_DATA": "s3://b"}, code=1)
    assert result.stderr.startswith("error: cannot write to s3://b/demo: ")
