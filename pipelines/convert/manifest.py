"""manifest.json: what the converted files of a folder are, each as the file itself tells it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fastsiam
from fastsiam.errors import DataError
from fastsiam.files import explained, parsed_json, written_whole


def write_manifest(path: Path, classes: tuple[str, ...], files: dict[str, dict[str, Any]]) -> None:
    """Write the manifest of a conversion, or of one part of it.

    Args:
        path: manifest.json, or manifest-00001-of-00008.json for a part.
        classes: names of the classes.
        files: what is noted of each file, by its name.

    Raises:
        DataError: it cannot be written.
    """
    manifest = {"fastsiam": fastsiam.__version__, "classes": list(classes), "files": files}
    with explained(DataError, f"cannot write {path}"), written_whole(path) as temporary:
        temporary.write_text(json.dumps(manifest, indent=1) + "\n")


def read_manifests(folder: Path) -> tuple[list[Path], dict[str, Any]]:
    """Read all manifests of a folder.

    Returns:
        The manifests, and what they note of each file, by its name; both empty if there are none.

    Raises:
        DataError: a manifest is damaged or cannot be read.
    """
    paths = sorted([*folder.glob("manifest.json"), *folder.glob("manifest-*-of-*.json")])
    known: dict[str, Any] = {}
    for path in paths:
        try:
            known |= dict(parsed_json(path.read_text())["files"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} cannot be read ({error}); convert again to renew it"
            ) from error
    return paths, known
