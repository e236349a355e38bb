"""Files of weights: read without executing anything, written whole or not at all."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from fastsiam.atomic import why, written_whole
from fastsiam.errors import CheckpointError

_HARMLESS_PACKAGES = re.compile(
    r"(addict|argparse|collections|datetime|lightly|lightning|lightning_fabric|mmcls|mmcv|mmengine"
    r"|mmpretrain|mmselfsup|numpy|omegaconf|pathlib|pytorch_lightning|solo|typing)\."
)
"""Their objects lie beside the weights in real files: settings, logs, versions."""

_HARMLESS_NAMES = re.compile(
    r"builtins\.(bool|bytearray|bytes|complex|dict|float|frozenset|int|list|object|range|set|slice"
    r"|str|tuple)|_codecs\.encode|copyreg\._reconstructor"
)

Writer = Callable[[Any, Path], None]


class _Inert:
    """Stands in for a foreign object: takes whatever the file gives it, and does nothing."""

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class _InertDict:
    """Stands in for a foreign dictionary; torch's unpickler fills exact dictionaries alone."""

    def __new__(cls, *args: Any) -> Any:
        return OrderedDict()


class _InertList:
    """Stands in for a foreign list, for the same reason."""

    def __new__(cls, *args: Any) -> Any:
        return []


def read(path: Path) -> Any:
    """Return what a file of weights holds, tensors on the CPU.

    Objects of well-known frameworks become inert stand-ins: nothing of them is imported or called.

    Args:
        path: a ``.safetensors`` file, or what ``torch.save`` wrote.

    Raises:
        CheckpointError: it is missing or damaged, or it holds anything else that is no tensor.
    """
    if not path.is_file():
        raise CheckpointError(f"no file of weights at {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        foreign = get_unsafe_globals_in_checkpoint(path) if zipfile.is_zipfile(path) else []
        if refused := sorted(name for name in foreign if not _is_harmless(name)):
            raise CheckpointError(
                f"{path} is refused: it asks for {refused[0]}, which has no place in a file of "
                "weights and might run a program"
            )
        stand_ins: list[Any] = [(_stand_in(name), name) for name in foreign]
        with safe_globals(stand_ins), warnings.catch_warnings(action="ignore"):
            return torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file makes the unpickler raise anything
        raise CheckpointError(
            f"cannot read {path}: it is damaged, or not a file of weights (of torch.save, or "
            ".safetensors)"
        ) from error


def write(path: Path, content: Any, writer: Writer) -> None:
    """Write a file whole or not at all.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written; an old file stays.
    """
    try:
        with written_whole(path) as temporary:
            writer(content, temporary)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {why(error)}") from error


def write_torch(content: Any, path: Path) -> None:
    """Write as ``torch.save`` does."""
    torch.save(content, path)


def write_safetensors(content: Any, path: Path) -> None:
    """Write a dictionary of tensors as safetensors."""
    save_file(content, path, metadata={"format": "pt"})


def write_pickle(content: Any, path: Path) -> None:
    """Write a plain pickle."""
    path.write_bytes(pickle.dumps(content))


def write_text(content: str, path: Path) -> None:
    """Write text, UTF-8."""
    path.write_text(content, encoding="utf-8")


def _is_harmless(name: str) -> bool:
    return bool(_HARMLESS_PACKAGES.match(name) or _HARMLESS_NAMES.fullmatch(name))


def _stand_in(name: str) -> type:
    kind = name.rpartition(".")[2].lower()
    if kind.endswith("dict") and name != "builtins.dict":
        return _InertDict
    return _InertList if kind == "deque" else _Inert
