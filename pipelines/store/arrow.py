"""Images in the folders of ``datasets``' ``save_to_disk``, in place.

Such a folder holds Arrow's streaming format: batches of a thousand rows, in which an image's bytes
lie as they are. So the file is mapped, and pyarrow tells once where in it each image begins; after
that nothing but the mapping is needed, in loader processes too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import AUTOMATIC, ColumnNames
from fastsiam.errors import DataError
from fastsiam.files import parsed_json

from .columns import Columns, columns_of, errors, numbered, require_pyarrow, short
from .mapped import Mapped
from .probe import Bytes
from .table import Places, TableStore

STATE = "state.json"


class ArrowStore(TableStore):
    """Images of a folder that ``datasets``' ``Dataset.save_to_disk`` wrote.

    Args:
        root: the folder.
        names: columns that the user named.

    Raises:
        DataError: pyarrow is missing, a file cannot be read or is damaged, no column, or more
            than one, holds images, or a named column is not there.
    """

    kind = "datasets' Arrow files, in place"

    def __init__(self, root: Path, names: ColumnNames = AUTOMATIC) -> None:
        require_pyarrow(root)
        self._wanted = names
        paths = _data_files(root)
        files = [Mapped(path) for path in paths]
        parts = [_Part(file, names) for file in files]
        columns = [part.columns for part in parts]
        super().__init__(root, paths, [len(part.size) for part in parts], columns)
        self._places = Places(
            files,
            np.repeat(np.arange(len(files)), [len(part.size) for part in parts]),
            np.concatenate([part.start for part in parts]),
            np.concatenate([part.size for part in parts]),
        )
        labelled = [part.labels for part in parts if part.labels is not None]
        self.classes = ()
        self.labels = np.full(len(self._places.size), -1)
        if len(labelled) == len(parts):
            self.labels, self.classes = numbered(labelled, columns[0].classes, root)
        self._refuse_paths_alone(self._places.size)

    def sizes(self) -> NDArray[np.int64]:
        """Return the bytes of each image: (images,)."""
        return self._places.size.astype(np.int64)

    def mapped(self) -> Sequence[Mapped]:
        """Return the Arrow files."""
        return self._places.files

    def locate(
        self, indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Return addresses and lengths of images in the mapped files."""
        return self._places.locate(indices)

    def ahead(self, indices: Sequence[int]) -> None:
        """Start to fetch images that will be read soon."""
        self._places.ahead(indices)

    def _encoded(self, index: int) -> Bytes:
        return self._places.read(index)

    def _named_paths(self) -> list[str | None]:
        return [path for file in self._places.files for path in _paths(file, self._wanted)]


def is_saved_dataset(folder: Path) -> bool:
    """Tell whether ``Dataset.save_to_disk`` wrote a folder."""
    return (folder / STATE).is_file() and (folder / "dataset_info.json").is_file()


def _data_files(root: Path) -> list[Path]:
    """Return the folder's Arrow files in the order of their rows."""
    try:
        state = parsed_json((root / STATE).read_text())
        return [root / str(file["filename"]) for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{root / STATE} cannot be read ({short(error)}): save the data set again, with "
            "save_to_disk"
        ) from error


class _Part:
    """Where the images of one Arrow file lie, and their labels.

    Args:
        file: mapped; nothing of it is copied.
        names: columns that the user named.
    """

    start: NDArray[np.int64]
    """(rows,) where in the file an image's bytes begin."""
    size: NDArray[np.int64]
    """(rows,) how many there are; 0 where there are none."""
    labels: Any = None
    """The label column, if there is one."""

    def __init__(self, file: Mapped, names: ColumnNames) -> None:
        import pyarrow

        memory = np.frombuffer(file.view, np.uint8)
        found = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
        labels = []
        for columns, batch in _batches(file, names):
            found.append(_placed(batch.column(columns.image), columns, memory, file.path))
            if columns.label is not None:
                labels.append(batch.column(columns.label))
        self.columns = columns
        self.start, self.size = (np.concatenate(part) for part in zip(*found, strict=True))
        if labels:
            self.labels = pyarrow.chunked_array(labels).combine_chunks()


def _batches(file: Mapped, names: ColumnNames) -> Iterator[tuple[Columns, Any]]:
    """Yield the record batches of a file, which look into its mapping; one without rows is last."""
    import pyarrow

    try:
        stream = pyarrow.ipc.open_stream(pyarrow.BufferReader(pyarrow.py_buffer(file.view)))
        columns = columns_of(file.path, stream.schema, names)
        for batch in stream:
            batch.validate(full=True)  # pyarrow itself trusts what a file says of offsets
            yield columns, batch
        yield columns, pyarrow.RecordBatch.from_pylist([], schema=stream.schema)
    except errors() as error:
        raise DataError(
            f"{file.path} is no whole Arrow stream ({short(error)}): save the data set again"
        ) from error


def _placed(
    images: Any, columns: Columns, memory: NDArray[np.uint8], path: Path
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where the bytes of a batch's images begin in the file, and how many there are."""
    import pyarrow

    if not columns.bare and images.type.get_field_index("bytes") < 0:  # none, or two of them
        raise DataError(f"{path} is damaged: its images have no bytes; save the data set again")
    data = images if columns.bare else images.field("bytes")
    wide = pyarrow.types.is_large_binary(data.type)
    _, offsets, content = data.buffers()
    if not len(data) or content is None or not content.size:
        return np.zeros(len(data), np.int64), np.zeros(len(data), np.int64)
    end = data.offset + len(data) + 1  # the buffer may be longer, by any number of bytes
    edges = np.frombuffer(offsets, np.int64 if wide else np.int32, end)[data.offset :]
    edges = edges.astype(np.int64)
    begin = content.address - memory.ctypes.data
    if not 0 <= begin <= len(memory) - content.size:
        raise DataError(f"{path} is compressed: save the data set again without compression")
    if (np.diff(edges) < 0).any() or edges[0] < 0 or edges[-1] > content.size:
        raise DataError(f"{path} is damaged: images lie outside of it; save the data set again")
    there = np.asarray(data.is_valid()) & np.asarray(images.is_valid())
    return begin + edges[:-1], np.where(there, np.diff(edges), 0)


def _paths(file: Mapped, names: ColumnNames) -> list[str | None]:
    """Return the path that each row of a file names, if any."""
    paths: list[str | None] = []
    for columns, batch in _batches(file, names):
        images = batch.column(columns.image)
        if columns.bare or images.type.get_field_index("path") < 0:
            paths += [None] * len(batch)
        else:
            paths += images.field("path").to_pylist()
    return paths
