"""Exporting a network for another program, with what its run's evaluations found of it."""

from __future__ import annotations

from pathlib import Path

from fastsiam.evaluate.features import fingerprint
from fastsiam.evaluate.records import Record, read_records
from fastsiam.interchange import Pretrained, export_weights


def export(pretrained: Pretrained, *, layout: str, out: Path, force: bool = False) -> list[Path]:
    """Write a network's weights and a model card; the card shows the evaluations of these weights.

    Args:
        pretrained: the network.
        layout: library whose names the weights get.
        out: file to write.
        force: overwrite files that are there.

    Returns:
        The files written.

    Raises:
        ValueError: no such layout, or the file's ending is not one of its endings.
        FastSiamError: the layout cannot hold the network, the files cannot be written, or a record
            of an evaluation cannot be read.
    """
    results = _evaluations(pretrained)
    return export_weights(pretrained, format=layout, out=out, results=results, force=force)


def _evaluations(pretrained: Pretrained) -> list[Record]:
    """Return the records of these very weights; a run's folder also has those of other epochs."""
    records = read_records(pretrained.run) if pretrained.run else []
    own = fingerprint(pretrained.network()) if records else ""
    return [record for record in records if record.network.fingerprint == own]
