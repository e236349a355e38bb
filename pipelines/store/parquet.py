"""Images in parquet files, as written by Hugging Face ``datasets``: an image struct and a label.

A conversion reads images in order with pyarrow, one row group at a time. Training reads them in
random order, through an index of their offsets. ``datasets`` writes images uncompressed and
contiguously. To build the index, pyarrow reads every image once, and its bytes are searched in the
row group's part of the file. So the image's bytes were found at every offset in the index.

Compressed files do not contain the images' bytes as such, so they have to be converted first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, starmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import AUTOMATIC, ColumnNames
from fastsiam.console import tally
from fastsiam.errors import DataError
from fastsiam.files import quote
from fastsiam.kernels.cores import cores

from ..remote import RemoteFile, RemotePath
from ..remote.path import Place
from .base import Store
from .columns import arrow_errors, require_pyarrow
from .index import ROW, Index, open_index
from .mapped_files import FileReader, Mapped
from .probe import Bytes
from .splits import Split, choose_split, find_split
from .table import TableStore

PARQUET = ".parquet"
_BATCH = 64
"""Number of images that pyarrow reads at a time."""


class ParquetStore(TableStore):
    """Images of parquet files.

    If ``in_order``, images are read in order, as a conversion does, and each row group once.
    Otherwise they are read at random, through an index.

    Raises:
        DataError: pyarrow is missing; a file cannot be read or lacks the image column; or the
            images are compressed or remote and ``in_order`` is False.
    """

    kind = "parquet files"
    files: Sequence[Mapped] = ()

    def __init__(
        self,
        root: Place,
        files: Sequence[Place],
        names: ColumnNames = AUTOMATIC,
        *,
        in_order: bool = False,
    ) -> None:
        require_pyarrow(root)
        tables = [_open_table(path) for path in files]
        self._metadata: list[Any] = [table.metadata for table in tables]
        schemas = [table.schema_arrow for table in tables]
        super().__init__(
            root, files, schemas, [metadata.num_rows for metadata in self._metadata], names
        )
        self._row_groups = [
            (file, number)
            for file, metadata in enumerate(self._metadata)
            for number in range(metadata.num_row_groups)
        ]
        """(file index, index in the file) of each row group."""
        self._check_content(chain.from_iterable(starmap(self._read_images, self._row_groups)))
        if in_order:  # sizes are the mean of the row group
            facts = [self._metadata[file].row_group(number) for file, number in self._row_groups]
            counts = [metadata.num_rows for metadata in facts]
            means = [metadata.total_byte_size // max(1, metadata.num_rows) for metadata in facts]
            self.groups = np.repeat(np.arange(len(facts)), counts)
            self._first_images = np.cumsum([0, *counts])
            self._last, self._images = -1, iter(list[tuple[int, bytes]]())
            """Position of the last image that was read, and the rest of its row group."""
            self.start, self.size = np.zeros(len(self), np.int64), np.repeat(means, counts)
        else:
            self._index()
            self._metadata = [None] * len(files)  # free megabytes; only names are read from now on

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the row group iterator: a copy starts its row group again."""
        return self.__dict__ | {"_last": -1, "_images": None}

    def _read(self, index: int) -> Bytes:
        """Return an image's bytes; if ``in_order``, read on from the last one in its row group."""
        if self.groups is None:
            return super()._read(index)
        group, position = int(self.groups[index]), self.position(index)
        (file, number), first = self._row_groups[group], int(self._first_images[group])
        if not first <= self._last < position:
            self._last, self._images = -1, enumerate(self._read_images(file, number), first)
        for at, data in self._images:
            self._last = at
            if at == position:
                return data
        path = self._tables[file].path
        raise DataError(f"{path} is damaged in row group {number}: it ends early")

    def _index(self) -> None:
        """Load or build the index, and set the byte range of each image."""
        local_paths = [table.path for table in self._tables if isinstance(table.path, Path)]
        if len(local_paths) < len(self._tables):
            raise self._random_access_error("are on another machine")
        self.files = [Mapped(path) for path in local_paths]
        rows = open_index(self.files, self._build, *self._named[:1])["rows"]
        if len(rows) != len(self):
            raise DataError(f"{self.root} is damaged: its columns differ in length")
        self._set_places(self.files, rows["file"], rows["offset"], rows["size"])
        self._check_has_bytes()

    def _build(self, source: str) -> Index:
        """Build the index: find the bytes of all images in the files."""
        rows = [np.zeros(0, ROW)]
        with (
            tally(f"indexing {source}, row groups", len(self._row_groups)) as progress,
            ThreadPoolExecutor(cores()) as pool,
        ):
            # On an error, the iterator cancels the other row groups.
            for group_rows in pool.map(self._find_images, *zip(*self._row_groups, strict=True)):
                rows.append(group_rows)
                progress.add()
        return {"rows": np.concatenate(rows)}

    def _random_access_error(self, reason: str) -> DataError:
        """Return the error for images that cannot be read in random order."""
        option = f" --image-column {quote(self._named[0])}" if self._named else ""
        return DataError(
            f"the images in {self.root} {reason}, so they can only be read in order; convert them: "
            f"fastsiam convert parquet --source {quote(self.root)}{option} --out DIR, and pass "
            "--data DIR"
        )

    def _find_images(self, file: int, number: int) -> NDArray[np.void]:
        """Return the index rows of a row group's images.

        Images are stored one after the other, but identical images may be stored only once.

        Raises:
            DataError: the file is corrupt, or the images' bytes are not in it.
        """
        if not self._metadata[file].row_group(number).num_rows:
            return np.zeros(0, ROW)
        path, name = self._tables[file].path, self._tables[file].bytes
        with arrow_errors(f"{path} is damaged"), _open_table(path, self._metadata[file]) as table:
            schema = table.metadata.schema
            names = [schema.column(i).path for i in range(len(schema))]
            # Reading raises on corrupt column metadata, where .column() would abort the process.
            next(table.iter_batches(1, [number], [name], use_threads=False), None)
            column = table.metadata.row_group(number).column(names.index(name))
            if column.path_in_schema != name:
                raise ValueError(f"row group {number} has no column {name!r}")
            start = min(filter(None, (column.dictionary_page_offset, column.data_page_offset)))
            end = start + column.total_compressed_size
            if column.compression != "UNCOMPRESSED":
                raise self._random_access_error("are compressed")
        rows, next_start, find = [], start, self.files[file].map.find
        for data in self._read_images(file, number):
            offset = find(data, next_start, end)
            if offset < 0 and (offset := find(data, start, end)) < 0:
                raise self._random_access_error("are compressed")
            rows.append((offset, len(data), -1, file, 0, 0, 0))
            next_start = max(next_start, offset + len(data))
        return np.array(rows, ROW)

    def _read_images(self, file: int, number: int) -> Iterator[bytes]:
        """Yield the bytes of each image in a row group; empty if a row has no bytes.

        Raises:
            DataError: the row group is corrupt.
        """
        from pyarrow import Table

        path, leaf = self._tables[file].path, self._tables[file].bytes
        with (
            arrow_errors(f"{path} is damaged in row group {number}"),
            _open_table(path, self._metadata[file]) as table,
        ):
            for batch in table.iter_batches(_BATCH, [number], [leaf], use_threads=False):
                for data in Table.from_batches([batch]).flatten().column(leaf):
                    yield data.as_py() or b""

    def _read_leaf(self, file: int, leaf: str) -> Any:
        with _open_table(self._tables[file].path, self._metadata[file]) as table:
            return table.read([leaf]).flatten().column(leaf)


def open_parquet(
    root: Place, split: Split, names: ColumnNames = AUTOMATIC, *, in_order: bool = False
) -> Store:
    """Open a split of a parquet file, or of the parquet files in a folder and its subfolders.

    Raises:
        NoSplitError: the split does not exist.
        DataError: there are no parquet files, the split's files are in several folders, or
            ``ParquetStore`` raises it.
    """
    if root.is_file():
        return ParquetStore(root, find_split(root, split), names, in_order=in_order)

    def relative(path: Place) -> str:
        return str(path).removeprefix(f"{root}/")

    paths: list[Place] = sorted(
        path
        for path in root.rglob(f"*{PARQUET}")
        if "/." not in f"/{relative(path)}" and path.is_file()
    )
    if not paths:
        raise DataError(f"{root} holds no {PARQUET} files")
    files = choose_split(split, paths, root)
    if len(folders := sorted({path.parent for path in files})) > 1:
        examples = ", ".join(map(relative, folders[:3]))
        raise DataError(
            f"{root} has {split} images in several folders of parquet files ({examples}): pass one "
            f"of them, such as {folders[0]}"
        )
    return ParquetStore(root, files, names, in_order=in_order)


def _open_table(path: Place, metadata: Any = None) -> Any:
    """Open a parquet file with pyarrow, reusing ``metadata`` from an earlier call if given.

    Raises:
        DataError: the file is corrupt.
    """
    from pyarrow import parquet

    with arrow_errors(f"{path} is not a complete parquet file"):
        if isinstance(path, RemotePath):
            file = RemoteFile(path)
            reader = FileReader(file.read, 0, len(file))
            return parquet.ParquetFile(reader, metadata=metadata, pre_buffer=True)
        # without memory_map pyarrow reads all images of a row group into memory
        return parquet.ParquetFile(path, metadata=metadata, memory_map=True)
