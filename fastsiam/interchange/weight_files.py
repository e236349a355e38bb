"""Weight files: read without executing code from them, and written atomically."""

from __future__ import annotations

import json
import pickle  # only to write; torch's restricted unpickler reads  # nosec B403
import re
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch.serialization import safe_globals

from fastsiam.errors import CheckpointError, lacks_memory
from fastsiam.files import atomic_write, os_errors_as, parse_json, reason
from fastsiam.run.checkpoint import previous_hint

_HARMLESS = re.compile(
    r"(addict|argparse|collections|datetime|detectron2|easydict|fvcore|lightly|lightly_train"
    r"|lightning|lightning_fabric|lightning_utilities|ml_collections|mmcls|mmcv|mmengine|mmpretrain"
    r"|mmselfsup|numpy|omegaconf|pathlib|pytorch_lightning|solo|torchmetrics|typing|uuid|yacs)\..*"
    r"|builtins\.(bool|bytearray|bytes|complex|dict|float|frozenset|getattr|int|list|object|range"
    r"|set|slice|str|tuple)|_codecs\.encode|copyreg\._reconstructor"
    r"|torch\.torch_version\.TorchVersion"
)
"""Names that occur next to the weights in real files: settings, logs, versions. mmengine's logs
pickle methods by ``getattr``; its stand-in does nothing."""

_UNKNOWN = re.compile(r"GLOBAL (.+?) (was not an allowed global|whose module .* is blocked)")
"""Matches the error with which torch's unpickler rejects a name; it omits ``builtins.``."""

_MOST_NAMES = 200
"""Limit on the third-party names in one file, because each costs another attempt to read it."""


class _ArrayPickler(pickle.Pickler):
    """Pickler whose arrays any version of numpy can read: numpy 2 moved the modules they name."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return np.ndarray, (value.shape, value.dtype.str, bytearray(value.tobytes()))
        return NotImplemented


class _Inert:
    """Stand-in for a third-party object: accepts any arguments and state, and does nothing."""

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


def read(path: Path) -> Any:
    """Read a ``.safetensors`` or ``torch.save`` file; tensors are on the CPU.

    Objects of well-known frameworks become inert stand-ins: their code is not imported or called.

    Raises:
        CheckpointError: the file is corrupt, or contains objects of unknown packages.
    """
    try:
        with os_errors_as(CheckpointError, f"cannot read {path}"):
            content = _read_safetensors(path) if path.suffix == ".safetensors" else _unpickle(path)
        return content
    except CheckpointError:
        raise
    except Exception as error:  # the unpickler can raise any exception on a corrupt file
        if lacks_memory(error):
            raise CheckpointError(f"cannot read {path}: out of memory") from error
        fault = (
            "it is corrupt, or not a weights file (torch.save or .safetensors; files of TensorFlow "
            "and JAX must be converted to PyTorch first)"
        )
        if "TorchScript" in str(error):
            fault = "it is a TorchScript archive: save its state_dict() instead"
        raise CheckpointError(f"cannot read {path}: {fault}{previous_hint(path)}") from error


def write(path: Path, content: Any) -> None:
    """Write text or weights atomically; the file's ending selects the format of weights.

    Args:
        path: ``.safetensors`` for tensors, or a ``state_dict`` with metadata; ``.pkl`` for a pickle
            of plain values and numpy arrays; any other ending for ``torch.save``.
        content: text, or the content in the form that ``path`` requires.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written; an old file is kept.
    """
    try:
        with atomic_write(path) as temporary:
            if isinstance(content, str):
                temporary.write_text(content, encoding="utf-8")
            elif path.suffix == ".safetensors":
                temporary.write_bytes(_as_safetensors(content))
            elif path.suffix == ".pkl":
                with temporary.open("wb") as file:
                    _ArrayPickler(file, protocol=4).dump(content)
            else:
                torch.save(content, temporary)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {reason(error)}") from error


def _as_safetensors(content: dict[str, Any]) -> bytes:
    metadata = dict(content) if "state_dict" in content else {"state_dict": content}
    state = metadata.pop("state_dict")
    texts = {k: x if isinstance(x, str) else json.dumps(x) for k, x in metadata.items()}
    data = save(state, metadata={"format": "pt"} | texts)
    # safetensors writes metadata in a random order; sorted, equal exports are equal files.
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    return len(text).to_bytes(8, "little") + text + data[end:]


def _read_safetensors(path: Path) -> dict[str, Any]:
    """Read the tensors; those of a plain file as ``state_dict``, next to its metadata."""
    with safe_open(path, framework="pt") as file:
        metadata = (file.metadata() or {}).get("fastsiam")
    state = load_file(path)
    return state if metadata is None else {"state_dict": state, "fastsiam": parse_json(metadata)}


def _unpickle(path: Path) -> Any:
    """Read with torch's restricted unpickler, again for each harmless name that it rejects.

    torch's own list of globals (``get_unsafe_globals_in_checkpoint``) supports neither files from
    before torch 1.6 nor all opcodes.
    """
    stand_ins: dict[str, type] = {}
    while True:
        allowed: list[Any] = [(kind, name) for name, kind in stand_ins.items()]
        try:
            with safe_globals(allowed), warnings.catch_warnings(action="ignore"):
                return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            match = _UNKNOWN.search(str(error))
            if match is None:
                raise
            name = match[1] if "." in match[1] else f"builtins.{match[1]}"
            is_harmless = _HARMLESS.fullmatch(name) and len(stand_ins) < _MOST_NAMES
            if name in stand_ins or not is_harmless:
                raise CheckpointError(
                    f"{path} is refused: it refers to {name}, which does not belong in a weights "
                    "file and might execute code"
                ) from error
            stand_ins[name] = _stand_in(name)


def _stand_in(name: str) -> type:
    """Return a class for a third-party one; torch's unpickler fills only plain dicts and lists."""
    kind = name.rpartition(".")[2].lower()
    is_dict = kind.endswith(("dict", "cfgnode")) and name != "builtins.dict"
    if not is_dict and kind != "deque":
        return _Inert
    return type(kind, (), {"__new__": lambda cls, *args: OrderedDict() if is_dict else []})
