"""README and docs: every command parses, every program runs, every link has a target."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from fastsiam.config import ModelConfig, SimSiamConfig
from fastsiam.interchange.export import export_weights
from fastsiam.methods import method_skeleton
from tests.commands import check_usage
from tests.conftest import ROOT
from tests.interchange.networks import refused, untrained

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
SHELL = {
    "apt-get", "cd", "cp", "done", "export", "for", "git", "ln", "make", "mkdir", "pip", "source",
    "sbatch", "sudo", "tar", "python", "python3", "torchrun", "srun", "[[", "scontrol", "exec",
    "fastsiam", ".venv/bin/python", ".venv/bin/fastsiam",
}  # fmt: skip
"""Programs that commands on pages may start with."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Return the code blocks of all pages, optionally only those in some languages."""
    code_blocks = []
    for page in PAGES:
        text = page.read_text()
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            code_blocks.append(Block(page, line, match[1], match[2]))
    return [block for block in code_blocks if not languages or block.language in languages]


def shell_commands(block: Block) -> Iterator[list[str]]:
    """Yield each command of a shell block as words, without comments, with variables expanded."""
    variables = {"SLURM_ARRAY_TASK_ID": "1"}
    for line in block.text.replace("\\\n", " ").splitlines():
        for name, value in variables.items():
            line = line.replace(f"${name}", value)
        words = shlex.split(line, comments=True)
        while words and (assigned := re.fullmatch(r"(\w+)=(.*)", words[0])):
            variables[assigned[1]] = assigned[2]
            words = words[1:]
        if words[:1] == ["for"]:
            variables[words[1]] = words[3].removesuffix(";")
        if words[:1] == ["sbatch"] or ("-c" in words and words[0] != "python"):  # nested shell
            yield from shell_commands(replace(block, text=words.pop()))
        while "&&" in words:
            cut = words.index("&&")
            yield words[:cut]
            words = words[cut + 1 :]
        if ">" in words:
            words = words[: words.index(">")]
        if words:
            yield words


def test_code_blocks_declare_language() -> None:
    known = {"sh", "python", "json", "toml", "yaml", "text"}
    assert not [str(block) for block in blocks("")]
    assert {block.language for block in blocks()} <= known
    for block in blocks("json"):
        for line in block.text.splitlines():
            json.loads(line)


@pytest.mark.parametrize("block", blocks("sh"), ids=str)
def test_shell_commands_parse(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()  # --resume and --config read a run before anything else
    (tmp_path / "runs" / "r50").symlink_to(ROOT / "tests" / "data" / "run-0.2")
    (tmp_path / "my.toml").write_text('recipe = "cifar10"')
    monkeypatch.chdir(tmp_path)
    result = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert not result.returncode, result.stderr
    for words in shell_commands(block):
        assert words[0] in SHELL, f"{block}: {words[0]}"
        if "fastsiam" in words[:-1] and words[0] in {"torchrun", "python", ".venv/bin/python"}:
            words = words[words.index("fastsiam") :]
        if words[0] in {"srun", "exec"} and "fastsiam" in words:
            words = words[words.index("fastsiam") :]
        if words[0].endswith("fastsiam"):
            check_usage([word for word in words[1:] if word != "..."])
        if words[0] == "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
            assert {word for word in words[1:] if "=" not in word} <= set(targets), block


def test_extras_in_pip_commands_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = set(extras["optional-dependencies"])
    for page in PAGES:
        named = re.findall(
            r"pip install '?(?:\.|fastsiam|dist/\*\.whl)\[([\w,]+)\]", page.read_text()
        )
        assert {name for names in named for name in names.split(",")} <= known, page


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: explicit ids, and those generated from headings."""
    text = page.read_text()
    names = set(re.findall(r'id="([^"]+)"', text))
    for heading in re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.M):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading)).lower().strip()
        names |= {words.replace(" ", "-"), re.sub(r"[ -]+", "-", words)}  # GitHub, MkDocs
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_have_targets(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", page.read_text()))
    for link in links:
        if not link.startswith(("https:", "http:")):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            if anchor and target.suffix == ".md":
                assert anchor in anchors(target), link


STAND_INS = {
    '"/data/imagenet"': "DATA",
    '"checkpoint_0099.pth.tar"': "WEIGHTS",
    'device="cuda"': 'device="cpu"',
    "batch=256": "batch=4",
    "batch=512": "batch=4",
    "range(100)": "range(1)",
    "crop=224": "crop=32",
    "subprocess.run": "check_command",
}
"""Text in programs on pages, and its replacement in the tests."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in the layout of the paper's authors."""
    path = tmp_path_factory.mktemp("weights") / "checkpoint_0099.pth.tar"
    network = untrained(ModelConfig(backbone="resnet18", method=SimSiamConfig(dim=512)), epoch=100)
    export_weights(network, format="simsiam", out=path)
    return path


PAGES_WITH_PROGRAMS = sorted(
    {block.page for block in blocks("python")}
)  # same order in all processes


@pytest.mark.dali
@pytest.mark.parametrize("page", PAGES_WITH_PROGRAMS, ids=lambda page: page.name)
def test_python_programs_run(
    page: Path, weights: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of a page run one after the other, with small data and networks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "dask_jobqueue", MagicMock())  # needs a cluster
    names = {
        "DATA": str(images / "train"),
        "WEIGHTS": str(weights),
        "model": lambda a, b: a.sum(),
        "check_command": lambda words, **_: check_usage([str(word) for word in words[1:]]),
    }
    for block in blocks("python"):
        if block.page == page:
            text = block.text
            for original, stand_in in STAND_INS.items():
                text = text.replace(original, stand_in)
            exec(compile(text, str(block), "exec"), names)


def test_export_table_matches_supported_formats() -> None:
    text = (ROOT / "docs" / "interchange.md").read_text()
    head, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\|.*\|$", text, re.M)
    )
    other_formats = {"moco", "swav"}  # only for runs of those methods
    assert {*head[1:], *other_formats} == set(refused(ModelConfig())) and len(rows) > 5
    for name, *cells in rows:
        backbone, _, flags = name.strip("`").partition(" --")
        setting, _, value = flags.partition(" ")
        settings: dict[str, Any] = (
            {setting: int(value) if value.isdigit() else value} if setting else {}
        )
        reasons = refused(ModelConfig(backbone=backbone, **settings))
        for format, cell in zip(head[1:], cells, strict=True):
            assert (cell == "yes") == (not reasons[format]), (name, format)


def test_tests_named_in_docs_and_scripts_exist() -> None:
    """pytest accepts --deselect of a test that does not exist."""
    named = [
        (page.name, Path("tests", file), test)
        for page in PAGES
        for file, test in re.findall(r"`([\w/]+/test_\w+\.py): (test_\w+)", page.read_text())
    ]
    for script in ("Makefile", "tests/arm.sh"):
        tests = re.findall(r"(tests/[\w/]+/test_\w+\.py)::(test_\w+)", (ROOT / script).read_text())
        assert tests
        named += [(script, Path(file), test) for file, test in tests]
    assert len(named) > 20
    assert not [one for one in named if not (ROOT / one[1]).is_file()]
    missing = [one for one in named if f"def {one[2]}(" not in (ROOT / one[1]).read_text()]
    assert not missing


@pytest.mark.parametrize("page", ["README.md", "docs/own-folder.md", "docs/operations.md"])
def test_documented_checkpoint_sizes_are_correct(page: str) -> None:
    """A run keeps two checkpoints, three while it saves: weights, buffers and SGD's momenta."""
    text = (ROOT / page).read_text()
    assert "run keeps two checkpoints, and a third while it saves" in text
    sizes = re.search(r"([\d.]+) GB each for a ResNet-50, ([\d.]+) GB for a ResNet-18", text)
    assert sizes
    for backbone, gigabytes in zip(("resnet50", "resnet18"), sizes.groups(), strict=True):
        method = method_skeleton(ModelConfig(backbone=backbone))
        tensor_bytes = [x.nbytes for x in (*method.state_dict().values(), *method.parameters())]
        assert f"{sum(tensor_bytes) / 1e9:.2f}" == gigabytes
