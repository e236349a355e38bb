"""Data set stores, which map an image's position to its encoded bytes, label and name.

``open_store`` detects the format of the data at a path: a .beton file or converted folder, tars,
a CIFAR archive, Hugging Face ``datasets`` folders, parquet files, image folders or image lists.
"""

from .archive import ArchiveStore
from .base import Store, select_images
from .beton import BetonStore
from .cifar import CifarStore
from .folder import FolderStore, ListedStore
from .mixed import MixedStore
from .parquet import ParquetStore, open_parquet
from .recognise import beton_files, open_store
from .splits import Split
from .table import ArrowStore

__all__ = [
    "ArchiveStore",
    "ArrowStore",
    "BetonStore",
    "CifarStore",
    "FolderStore",
    "ListedStore",
    "MixedStore",
    "ParquetStore",
    "Split",
    "Store",
    "beton_files",
    "open_parquet",
    "open_store",
    "select_images",
]
