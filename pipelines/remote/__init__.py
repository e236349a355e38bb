"""Data in object storage and on web servers: read in place, by ranges of bytes.

``RemotePath`` is asked what lies where, as a path is; ``RemoteFile`` gives bytes, as a mapped file
does. All requests are made by a process of their own (``server``), which ``client`` starts.
"""

from .file import RemoteFile
from .path import RemotePath

__all__ = ["RemoteFile", "RemotePath"]
