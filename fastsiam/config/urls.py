"""Addresses of data on other machines, told apart from paths before a path drops their slashes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Self
from urllib.parse import unquote

from fastsiam.errors import DataError

SCHEMES = ("s3", "gs", "az", "https", "http")
"""Object storage of S3's kind, Google's, Azure's; web servers."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_ENCODED = re.compile("(%(?!23|25|3F)[0-9A-F]{2})+", re.IGNORECASE)
"""Characters as browsers write them, such as ``%20``, except for those that would not be parts of
an address that is parsed again: ``#``, ``%`` and ``?``."""


@dataclass(frozen=True, order=True)
class Url:
    """Where data lie on another machine, with the parts that paths have.

    Its text never holds a secret: an address with a password or a signature is refused.
    """

    scheme: str
    """One of ``SCHEMES``."""
    host: str
    """Bucket (s3, gs), container (az), or server and port (http, https)."""
    key: str
    """Where in it, such as ``photos/train.tar``, without slashes at its ends; "" is all of it."""

    def __str__(self) -> str:
        """Return the address."""
        return f"{self.scheme}://{self.host}/{self.key}".rstrip("/")

    @property
    def name(self) -> str:
        """The last part."""
        return self.key.rpartition("/")[2] or self.host

    @property
    def stem(self) -> str:
        """The last part without its ending."""
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        """The ending of the last part, such as ``.tar``."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> Self:
        """What it lies in."""
        return replace(self, key=self.key.rpartition("/")[0])

    def __truediv__(self, name: str) -> Self:
        """Return what lies below it."""
        return replace(self, key="/".join(filter(None, (self.key, name.strip("/")))))

    def with_name(self, name: str) -> Self:
        """Return what lies beside it."""
        return self.parent / name

    def resolve(self) -> Self:
        """Return itself: there are no links."""
        return self


def place(text: str) -> Path | Url:
    """Return a path or, if the text is one, an address.

    Raises:
        DataError: it is an address of a kind that cannot be read, or holds a secret.
    """
    if not (match := _URL.fullmatch(text)):
        return Path(text)
    scheme, (host, _, key) = match[1].lower(), match[2].partition("/")
    if scheme not in SCHEMES:
        known = ", ".join(f"{own}://" for own in SCHEMES)
        raise DataError(f"data at {scheme}:// cannot be read: only at {known} or at a path")
    if "@" in host or "?" in text or "#" in text:
        bare = f"{scheme}://{host.rpartition('@')[2].partition('?')[0].partition('#')[0]}/..."
        raise DataError(
            f"the address at {bare} holds a password, a signature or a query, which files of the "
            "run would hold too: leave it out, and give credentials by the environment"
        )
    if scheme in ("http", "https"):
        key = _ENCODED.sub(lambda found: unquote(found[0]), key)
    if not host:
        raise DataError(f"{scheme}:// names no bucket or server: write {scheme}://NAME/PREFIX")
    parts = [*filter(None, key.split("/"))]
    if not {".", ".."}.isdisjoint(parts):
        raise DataError(f"{text} has a part . or .., which an address cannot have: write it out")
    return Url(scheme, host, "/".join(parts))
