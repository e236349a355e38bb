"""Images in the folders of ``datasets``' ``save_to_disk``, in place.

Such a folder holds Arrow's streaming format: batches of a thousand rows, which hold the bytes of
images unchanged. The files are mapped, and pyarrow tells once where each image begins. After that
only the mapping is needed, in loader processes too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import AUTOMATIC, ColumnNames
from fastsiam.errors import DataError
from fastsiam.files import parsed_json

from .columns import Columns, reading, require_pyarrow
from .files import Mapped
from .table import TableStore

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
        paths = _data_files(root)
        self._mapped = files = [Mapped(path) for path in paths]
        tables = [_read(file) for file in files]
        schemas, rows = [table.schema for table in tables], list(map(len, tables))
        super().__init__(root, paths, schemas, rows, names)
        columns = zip(files, self._columns, tables, strict=True)
        start, size = np.hstack([_places(*own) for own in columns])
        self._set_places(files, np.repeat(np.arange(len(files)), rows), start, size)
        self._refuse_paths_alone()

    def _read_column(self, file: int, column: str, part: str = "") -> Any:
        return _read(self._mapped[file]).column(column)


def is_saved_dataset(folder: Path) -> bool:
    """Tell whether ``Dataset.save_to_disk`` wrote a folder."""
    return (folder / STATE).is_file() and (folder / "dataset_info.json").is_file()


def _data_files(root: Path) -> list[Path]:
    """Return the folder's Arrow files in the order of their rows."""
    with reading(f"{root / STATE} cannot be read", "; save the data set again, with save_to_disk"):
        state = parsed_json((root / STATE).read_text())
        return [root / str(file["filename"]) for file in state["_data_files"]]


def _read(file: Mapped) -> Any:
    """Return an Arrow file's table, which looks into the mapping."""
    import pyarrow

    with reading(f"{file.path} is no whole Arrow stream", "; save the data set again"):
        stream = pyarrow.ipc.open_stream(pyarrow.BufferReader(pyarrow.py_buffer(file.view)))
        table = stream.read_all()
        table.validate(full=True)  # pyarrow itself trusts what a file says of offsets
        return table


def _places(file: Mapped, columns: Columns, table: Any) -> NDArray[np.int64]:
    """Return where the images of a table begin in the file, and their sizes: (2, images)."""
    images = table.column(columns.image)
    if not columns.bare and images.type.get_field_index("bytes") < 0:  # none, or two of them
        raise DataError(
            f"{file.path} is damaged: its images have no bytes; save the data set again"
        )
    places = [np.zeros((2, 0), np.int64)]
    for chunk in images.chunks:
        data = chunk if columns.bare else chunk.field("bytes")
        there = np.asarray(data.is_valid()) & np.asarray(chunk.is_valid())
        start, size = _places_of_chunk(file, data)
        places.append(np.stack([start, size * there]))
    return np.hstack(places)


def _places_of_chunk(file: Mapped, data: Any) -> NDArray[np.int64]:
    """Return where the values of an Arrow array of bytes begin in the file, and their sizes."""
    import pyarrow

    wide = pyarrow.types.is_large_binary(data.type)
    _, offsets, content = data.buffers()
    if not len(data) or content is None or not content.size:
        return np.zeros((2, len(data)), np.int64)
    end = data.offset + len(data) + 1  # the buffer may be longer, by any number of bytes
    edges = np.frombuffer(offsets, np.int64 if wide else np.int32, end)[data.offset :]
    edges = edges.astype(np.int64)
    begin = content.address - file.address
    if not 0 <= begin <= len(file) - content.size:
        raise DataError(f"{file.path} is compressed: save the data set again without compression")
    return np.stack([begin + edges[:-1], np.diff(edges)])
