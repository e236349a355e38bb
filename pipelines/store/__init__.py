"""Data sets as stores: position -> encoded bytes, label, name.

``open_store`` recognises what lies at a path: a converted folder or .beton file, tars, CIFAR's
archive, folders of Hugging Face's ``datasets``, a folder or a list of images.
"""

from .archive import ArchiveStore
from .base import Split, Store, picked
from .beton import BetonStore
from .cifar import CifarStore
from .folder import FolderStore, ListedStore
from .mixed import MixedStore
from .parquet import ParquetStore, open_parquet
from .recognise import beton_files, open_store
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
    "picked",
]
