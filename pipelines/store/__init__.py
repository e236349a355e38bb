"""Data sets as stores: position -> encoded bytes, label, name.

``open_store`` recognises what lies at a path: a converted folder or .beton file, tars, CIFAR's
archive, a folder of images.
"""

from .archive import ArchiveStore
from .base import Bytes, Split, Store
from .beton import BetonStore
from .cifar import CifarStore
from .folder import FolderStore
from .joined import JoinedStore
from .picked import picked
from .recognise import beton_files, open_store

__all__ = [
    "ArchiveStore",
    "BetonStore",
    "Bytes",
    "CifarStore",
    "FolderStore",
    "JoinedStore",
    "Split",
    "Store",
    "beton_files",
    "open_store",
    "picked",
]
