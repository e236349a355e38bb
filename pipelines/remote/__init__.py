"""Access to data in object storage and on web servers, read in place with range requests.

``RemotePath`` finds objects, with the methods of ``pathlib.Path``. ``RemoteFile`` returns ranges of
bytes, like a mapped file. ``storage`` makes the requests, and ``cache`` keeps the data on disk.
"""

from .file import RemoteFile
from .path import RemotePath

__all__ = ["RemoteFile", "RemotePath"]
