"""Data in object storage and on web servers, read in place by ranges of bytes.

``RemotePath`` tells what exists where, with the methods of a path. ``RemoteFile`` returns bytes, as
a mapped file does. ``storage`` makes the requests, and ``cache`` keeps what they return on a disk.
"""

from .file import RemoteFile
from .path import RemotePath

__all__ = ["RemoteFile", "RemotePath"]
