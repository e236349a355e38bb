"""The members of a tar file and their offsets.

Python's tarfile reads the headers. Damage that it accepts is refused here: a damaged header, which
it takes for the end, links to images, and sizes beyond the file.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from fastsiam.errors import DataError

from ..remote.path import Place
from .base import is_image_name
from .files import FileReader
from .probe import Bytes

_LARGEST_READ = 2**20
"""No header is longer, whatever it says of itself."""
_BLOCK = tarfile.BLOCKSIZE


def members(
    read: Callable[[int, int], Bytes], start: int, end: int, path: Place
) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Walk a tar: yield its regular files, each with the place where its bytes begin.

    Args:
        read: returns the bytes of a file between two places.
        start: where the tar begins within it.
        end: where it ends.
        path: the file, for messages.

    Raises:
        DataError: the tar is damaged or cut, or holds what cannot be read in place.
    """

    def read_little(first: int, last: int) -> Bytes:
        return read(first, min(last, first + _LARGEST_READ))

    try:
        with tarfile.open(fileobj=FileReader(read_little, start, end), mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # or a million of them stay
                at = start + member.offset_data
                if member.islnk() and is_image_name(PurePosixPath(member.name).name):
                    raise tarfile.ReadError(
                        f"{member.name} is a link to {member.linkname}; "
                        "create the tar with tar --hard-dereference"
                    )
                if not member.isreg():
                    continue
                if member.sparse is not None:
                    raise tarfile.ReadError(f"{member.name} is stored sparsely")
                if not 0 <= member.size < 2**32 or at + member.size > end:
                    raise tarfile.ReadError("unexpected end of data")
                yield member, at
            # The module takes a damaged header for the end; a whole tar ends with a block of zeros.
            last = read(start + tar.offset, min(start + tar.offset + _BLOCK, end))
            if len(last) < _BLOCK or any(last):
                raise tarfile.ReadError(f"damaged or cut after {start + tar.offset:,} bytes")
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{path} is no whole tar file ({error}); fetch it again, or check it with tar -tf"
        ) from error


def is_tar_name(name: str) -> bool:
    """Tell whether a member's name is that of a tar within the tar, and is not hidden."""
    return name.endswith(".tar") and not PurePosixPath(name).name.startswith(".")


def safe_name(name: str) -> str:
    """Drop from a member's name the parts that lead upwards or to a root: "../a" becomes "a"."""
    return "/".join(part for part in name.split("/") if part not in ("", ".", ".."))
