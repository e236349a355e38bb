"""URLs of remote data, parsed before ``Path`` would collapse their double slashes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Self
from urllib.parse import unquote

from fastsiam.errors import DataError

SCHEMES = ("s3", "gs", "az", "https", "http")
"""S3-compatible, Google and Azure object storage, and web servers."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_ENCODED = re.compile("(%(?!23|25|3F)[0-9A-F]{2})+", re.IGNORECASE)
"""Percent-encoded characters, such as ``%20``. ``#``, ``%`` and ``?`` stay encoded, so that a URL's
text can be parsed again."""


@dataclass(frozen=True, order=True)
class Url:
    """URL of remote data, with the attributes of a path.

    Its text never contains a secret: ``place`` rejects URLs with a password or a signature.
    """

    scheme: str
    """One of ``SCHEMES``."""
    host: str
    """Bucket (s3, gs), container (az), or server and port (http, https)."""
    key: str
    """Path in it, such as ``photos/train.tar``, without slashes at the ends; "" for the root."""

    def __str__(self) -> str:
        """Return the URL as text."""
        return f"{self.scheme}://{self.host}/{self.key}".rstrip("/")

    @property
    def name(self) -> str:
        """The last component."""
        return self.key.rpartition("/")[2] or self.host

    @property
    def stem(self) -> str:
        """The last component without its suffix."""
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        """The suffix of the last component, such as ``.tar``."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> Self:
        """The parent folder."""
        return replace(self, key=self.key.rpartition("/")[0])

    def __truediv__(self, name: str) -> Self:
        """Append components."""
        return replace(self, key="/".join(filter(None, (self.key, name.strip("/")))))

    def with_name(self, name: str) -> Self:
        """Replace the last component."""
        return self.parent / name

    def resolve(self) -> Self:
        """Return itself, because URLs have no symlinks."""
        return self


def place(text: str) -> Path | Url:
    """Parse a path or a URL.

    Raises:
        DataError: the URL is invalid, has an unsupported scheme, or contains a secret.
    """
    if not (match := _URL.fullmatch(text)):
        return Path(text)
    scheme, (host, _, key) = match[1].lower(), match[2].partition("/")
    if scheme not in SCHEMES:
        schemes = ", ".join(f"{name}://" for name in SCHEMES)
        raise DataError(f"cannot read data at {scheme}://; pass a path or a URL with {schemes}")
    if "@" in host or "?" in text or "#" in text:
        prefix = f"{scheme}://{host.rpartition('@')[2].partition('?')[0].partition('#')[0]}/..."
        raise DataError(
            f"the URL {prefix} contains a password, a signature or a query, which would be written "
            "to the run's files; leave it out, and pass credentials in environment variables"
        )
    if scheme in ("http", "https"):
        key = _ENCODED.sub(lambda code: unquote(code[0]), key)
    if not host:
        raise DataError(f"{scheme}:// has no bucket or server; write {scheme}://NAME/PREFIX")
    parts = [*filter(None, key.split("/"))]
    if not {".", ".."}.isdisjoint(parts):
        raise DataError(f"{text} contains . or .., which URLs do not support; write the path out")
    return Url(scheme, host, "/".join(parts))
