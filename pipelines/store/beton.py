"""FFCV's .beton format, read and written without FFCV: encoded images and labels in mapped files.

The layout is that of FFCV 1.0 (``ffcv/types.py``, version 2): header, field descriptors, metadata,
records, allocation table. Files written by ``fastsiam convert`` also have an *annex* with image
names, class names and checksums. Its offset is stored in the image field's arguments. FFCV's image
field does not use these, so FFCV can read the files.
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fastsiam.errors import DataError, as_one_line
from fastsiam.files import os_errors_as

from ..remote.path import Place
from .base import PlacedStore, warn_once
from .decode import ImageRules
from .labels import number_classes
from .mapped_files import File, open_file
from .probe import Bytes

VERSION = 2
HEADER = np.dtype(
    [
        ("version", "<u2"),
        ("num_fields", "<u2"),
        ("page_size", "<u4"),
        ("num_samples", "<u8"),
        ("alloc_table_ptr", "<u8"),
    ]
)
FIELD = np.dtype([("type_id", "u1"), ("name", "S16"), ("arguments", "V1024")])
RECORD = np.dtype([("sample_id", "<u8"), ("ptr", "<u8"), ("size", "<u8")])
"""Row of the allocation table."""
IMAGE = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("data_ptr", "<u8")])
METADATA = np.dtype({"names": ["image", "label"], "formats": [IMAGE, "<i8"], "offsets": [0, 16]})
"""Metadata of one image in fastsiam's files. FFCV aligns the label to 8 bytes."""

JPEG, RAW = 0, 1
"""Modes of a record: an encoded image, or raw pixels."""
INT_FIELD, IMAGE_FIELD = 1, 2
"""Type ids of fields."""

_BYTES = np.dtype([("ptr", "<u8"), ("size", "<u8")])
_FORMATS: tuple[Any, ...] = ("<f8", "<i8", IMAGE, _BYTES, "<u8", _BYTES, "<u8")
"""dtype of a field's metadata, by FFCV's type id."""
MARK = struct.Struct("<8sHQQII")
"""Start of the image field's arguments: magic, format; offset, size and CRC-32 of the annex; and a
CRC-32 of the header and field descriptors."""
MAGIC = b"fastsiam"
ANNEX_FORMAT = 1
_MOST_FIELDS = 64
_SMALLEST_PAGE, LARGEST_PAGE = 2**23, 2**31


class BetonStore(PlacedStore):
    """A .beton file or its parts, with tables in memory and memory-mapped records.

    Opening a file checks everything that determines the byte ranges of its records. So a truncated
    or corrupt file raises an error, and reads stay within the file. Files written by ``fastsiam
    convert`` have checksums of the header, the metadata and the allocation table.

    Args:
        paths: the file, or all of its parts in one folder.

    Raises:
        DataError: a file cannot be read, is corrupt or has no image field; or the parts were
            converted from different images or with different options.
    """

    kind = "converted file"
    columns = (*PlacedStore.columns, "modes", "crc")
    width: NDArray[Any]
    height: NDArray[Any]

    def __init__(self, *paths: Place) -> None:
        files = [open_file(path) for path in paths]
        parts = [_Part(file) for file in files]
        first = parts[0]
        self.root = paths[0]
        if len(parts) > 1:
            self.root, self.kind = paths[0].parent, "parts of a conversion"
        tables = [part.read_tables() for part in parts]
        for part in parts:
            if part.about.get("set") != first.about.get("set"):
                raise DataError(
                    f"{part.path} and {first.path} were converted from different images or with "
                    "different options: convert one of them again"
                )
            if part.classes != first.classes:
                raise DataError(f"{part.path} and {first.path} have different classes")
        self._parts = parts
        self.classes, self.about = first.classes, first.about
        """``about`` is the file's entry in the manifest; empty if FFCV wrote the file."""
        self.page_size, self.fields = first.page_size, first.fields
        """``fields`` are the names of the file's fields."""
        self.image_field = first.image_field
        """Name of the image field."""
        counts = [len(part_table["start"]) for part_table in tables]
        self._first = np.cumsum([0, *counts])
        table = {
            name: np.concatenate([part_table[name] for part_table in tables]) for name in tables[0]
        }
        self.labels, self.width, self.height = table["labels"], table["width"], table["height"]
        self.modes = table["modes"]
        """(images,) JPEG or RAW."""
        self.crc = table["crc"] if all(part.annex for part in parts) else None
        """(images,) CRC-32 of each record; None if FFCV wrote the file."""
        file = np.repeat(np.arange(len(parts)), counts)
        self._set_places(files, file, table["start"], table["size"])

    def set_rules(self, rules: ImageRules) -> None:
        """Warn about rules that differ from those of the conversion; they have no effect."""
        for option, default in asdict(ImageRules()).items():
            value = getattr(rules, option)
            conversion_value = self.about.get("options", {}).get(option, default)
            if value not in (default, conversion_value):
                warn_once(
                    f"--{option} {value} has no effect on {self.root}, which was converted with "
                    f"--{option} {conversion_value}: convert the images again with "
                    f"--{option} {value}"
                )

    def raw_size(self, index: int) -> tuple[int, int] | None:
        """Return (height, width) if the image is stored as raw pixels, else None."""
        if self.modes[index] == RAW:
            return int(self.height[index]), int(self.width[index])
        return None

    def decode(self, index: int, data: Bytes | None = None) -> Image.Image:
        """Decode an image to RGB; see ``Store.decode``.

        Raises:
            ImageError: it cannot be decoded, or its size differs from the one in the metadata.
        """
        image = super().decode(index, data)
        if image.size != (self.width[index], self.height[index]):
            raise self.cannot_decode(index, "its size differs from the size in the file's metadata")
        return image

    def name(self, index: int) -> str:
        """Return the image's name in the source data set, or ``image N`` if FFCV wrote the file."""
        part, row = self._find(index)
        return part.names[row] if part.annex else f"image {row}"

    def where(self, index: int) -> str:
        """Return an image's file, position and name, for messages."""
        part, row = self._find(index)
        return f"image {row} of {part.path}" + (f" ({part.names[row]})" if part.annex else "")

    def is_intact(self, index: int, data: Bytes) -> bool:
        """Return whether bytes match an image's checksum; True if the file has no checksums."""
        return self.crc is None or zlib.crc32(data) == int(self.crc[index])

    def stamp(self) -> str:
        """Return a fingerprint of the files: paths, sizes and modification times."""
        with os_errors_as(DataError, f"cannot read {self.root}"):
            stats = [(part.path.resolve(), part.path.stat()) for part in self._parts]
        return " ".join(f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats)

    def _find(self, index: int) -> tuple[_Part, int]:
        """Return the part that contains an image, and the image's position in it."""
        number = int(self.file[index])
        return self._parts[number], self.position(index) - int(self._first[number])


class _Part:
    """One .beton file: its header, tables and annex."""

    def __init__(self, file: File) -> None:
        self.path, self.file = file.path, file
        if len(self.file) < HEADER.itemsize:
            raise self._damage_error(f"it has {len(self.file)} bytes")
        head = self.file.read(0, HEADER.itemsize + _MOST_FIELDS * FIELD.itemsize)
        self._header = np.frombuffer(head, HEADER, 1)[0]
        if self._header["version"] != VERSION:
            raise self._damage_error(f"its format is {self._header['version']}, not {VERSION}")
        count = int(self._header["num_fields"])
        self._tables = HEADER.itemsize + count * FIELD.itemsize
        """Offset of the metadata."""
        if not 0 < count <= _MOST_FIELDS or self._tables > len(head):
            raise self._damage_error(f"its header claims {count} fields")
        self._fields = np.frombuffer(head, FIELD, count, HEADER.itemsize)
        self.page_size = int(self._header["page_size"])
        self.fields = tuple(field["name"].decode("ascii", "replace") for field in self._fields)
        kinds = zip(self.fields, self._fields["type_id"].tolist(), strict=True)
        if unknown := [name for name, kind in kinds if kind >= len(_FORMATS)]:
            raise DataError(
                f"{self.path} has fields of custom types, which cannot be read: {unknown}; "
                "convert the original images"
            )
        image = self._number_of(IMAGE_FIELD, b"image")
        if image is None:
            raise DataError(
                f"{self.path} has no image field (only {as_one_line(', '.join(self.fields))})"
            )
        self._image, self.image_field = image, self.fields[image]
        self.classes: tuple[str, ...] = ()
        self.about: dict[str, Any] = {}
        self._crc = np.zeros(0, np.uint32)
        self.annex = self._read_annex()
        """Start and end offset of the annex; None if FFCV wrote the file."""

    def read_tables(self) -> dict[str, NDArray[Any]]:
        """Read and check the metadata and allocation table; return one array per column."""
        kinds = self._fields["type_id"].tolist()
        row = np.dtype([(f"f{i}", _FORMATS[kind]) for i, kind in enumerate(kinds)], align=True)
        count = int(self._header["num_samples"])
        end = self._tables + count * row.itemsize
        if end > len(self.file):
            raise self._damage_error(f"it ends before its metadata of {count:,} images")
        rows = np.frombuffer(self.file.read(self._tables, end), row) if count else np.empty(0, row)
        image, label = rows[f"f{self._image}"], self._number_of(INT_FIELD, b"label")
        labels = np.full(count, -1) if label is None else rows[f"f{label}"]
        modes, width, height = image["mode"].copy(), image["width"], image["height"]
        size = self._read_sizes(image["data_ptr"], zlib.crc32(rows.data))
        labels, self.classes = number_classes(labels, self.path, self.classes)
        raw = modes == RAW
        pixels = 3 * width[raw].astype(np.int64) * height[raw]
        if (pixels != size[raw]).any() or (modes > RAW).any():
            raise self._damage_error("sizes and lengths of its images do not match")
        return {
            "labels": labels,
            "modes": modes,
            "width": width.astype(np.int32),
            "height": height.astype(np.int32),
            "start": image["data_ptr"].astype(np.int64),
            "size": size,
            "crc": self._crc,
        }

    @cached_property
    def names(self) -> list[str]:
        """Names of the images, by position in the file."""
        assert self.annex is not None
        with np.load(io.BytesIO(self.file.read(*self.annex))) as annex:
            names: str = annex["names"].tobytes().decode("utf-8", "surrogateescape")
            return names.split("\0")

    def _read_annex(self) -> tuple[int, int] | None:
        """Locate the annex with the image field's arguments, verify its checksum, and read it."""
        arguments = self._fields[self._image]["arguments"].tobytes()
        if not any(arguments):  # as FFCV's own image field leaves them
            return None
        if not arguments.startswith(MAGIC):
            raise self._damage_error("the arguments of its image field are not fastsiam's")
        _, version, start, size, crc, check = MARK.unpack_from(arguments)
        if version != ANNEX_FORMAT:
            raise DataError(
                f"{self.path} was written by a newer fastsiam (annex {version}); update fastsiam"
            )
        header = bytearray(self.file.read(0, self._tables))
        offset = HEADER.itemsize + self._image * FIELD.itemsize + 17 + MARK.size - 4
        header[offset : offset + 4] = bytes(4)
        if zlib.crc32(header) != check:
            raise self._damage_error("its header does not match its checksum")
        stop = start + size
        if stop > len(self.file) or zlib.crc32(data := self.file.read(start, stop)) != crc:
            raise self._damage_error("its annex is missing or does not match its checksum")
        try:
            with np.load(io.BytesIO(data)) as annex:
                text, self._crc = json.loads(annex["text"].tobytes()), annex["crc"]
            self.about, self.classes = text["about"], tuple(text["classes"])
        except Exception as error:  # numpy can raise any exception on a corrupt file
            raise self._damage_error("its annex cannot be read") from error
        return start, stop

    def _number_of(self, kind: int, name: bytes) -> int | None:
        """Return the index of the field with a type and name, else of the first with that type."""
        of_kind = [i for i, field in enumerate(self._fields) if field["type_id"] == kind]
        matches = [i for i in of_kind if self._fields[i]["name"] == name]
        return next(iter(matches + of_kind), None)

    def _read_sizes(self, start: NDArray[np.uint64], metadata_crc32: int) -> NDArray[np.int64]:
        """Look up the sizes of the records at these offsets in the allocation table, in any order.

        The annex has the CRC-32 of metadata and table.
        """
        if not len(start):
            return np.empty(0, np.int64)
        at = int(self._header["alloc_table_ptr"])
        size = len(self.file) - at
        most = RECORD.itemsize * int(self._header["num_samples"]) * len(self.fields)
        if size > most:  # would be downloaded if the file is remote
            raise self._damage_error("its allocation table is not at the end of the file")
        if at < HEADER.itemsize or size < RECORD.itemsize or size % RECORD.itemsize:
            raise self._damage_error("its allocation table is incomplete")
        table = np.frombuffer(self.file.read(at, at + size), RECORD)
        order = np.argsort(table["ptr"], kind="stable")
        place = np.searchsorted(table["ptr"], start, sorter=order)
        records = table[order[np.minimum(place, len(table) - 1)]]
        if (records["ptr"] != start).any():
            raise self._damage_error("its allocation table lacks images")
        if self.annex and zlib.crc32(table.data, metadata_crc32) != self.about.get("tables_crc32"):
            raise self._damage_error("its metadata do not match their checksum")
        return records["size"].astype(np.int64)

    def _damage_error(self, reason: str) -> DataError:
        return DataError(f"{self.path} is damaged or not a .beton file: {reason}; convert it again")


def page_size(length: int) -> int:
    """Return the smallest page size that fits a record: a power of 2, at least 8 MiB."""
    return max(_SMALLEST_PAGE, 1 << (length - 1).bit_length())


def pack_annex(
    about: dict[str, Any], classes: Sequence[str], crc: NDArray[np.uint32], names: Sequence[str]
) -> bytes:
    """Pack fastsiam's additions to FFCV's format into the bytes of an .npz archive.

    Args:
        about: the split's entry in the manifest.
        classes: class names, indexed by label.
        crc: (images,) CRC-32 of each record.
        names: (images,) image names.
    """
    text = json.dumps({"about": about, "classes": list(classes)}).encode()
    joined = "\0".join(name.replace("\0", "_") for name in names)
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        text=np.frombuffer(text, np.uint8),
        crc=crc,
        names=np.frombuffer(joined.encode("utf-8", "surrogateescape"), np.uint8),
    )
    return buffer.getvalue()


def head(images: int, page_size: int, table: int, annex_start: int, annex: bytes) -> bytes:
    """Return the header and field descriptors of a file, with the fields "image" and "label".

    Args:
        images: number of images.
        page_size: a power of 2; no record crosses a page boundary.
        table, annex_start: offsets of the allocation table and the annex.
        annex: result of ``pack_annex``.
    """
    header, fields = np.zeros(1, HEADER), np.zeros(2, FIELD)
    header[0] = (VERSION, 2, page_size, images, table)
    fields[1] = (INT_FIELD, b"label", bytes(1024))
    mark = [MAGIC, ANNEX_FORMAT, annex_start, len(annex), zlib.crc32(annex)]

    def with_check(check: int) -> bytes:
        fields[0] = (IMAGE_FIELD, b"image", MARK.pack(*mark, check).ljust(1024, b"\0"))
        return header.tobytes() + fields.tobytes()

    return with_check(zlib.crc32(with_check(0)))
