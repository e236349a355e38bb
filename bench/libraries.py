"""Libraries that ``bench peers`` compares with: packages and differences. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec

from fastsiam.errors import BackendError


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A library that makes views."""

    title: str
    """Name in tables."""
    packages: tuple[str, ...]
    """Modules that must be importable."""
    install: str
    """What to install with pip."""
    differs: str
    """How its work differs from fastsiam's."""

    @property
    def missing(self) -> str | None:
        """How to install the library; None if all modules that it needs are installed."""
        return None if all(map(_is_there, self.packages)) else f"pip install {self.install}"

    @property
    def version(self) -> str:
        """The installed version."""
        try:
            return metadata.version(self.install.replace(",", " ").split()[0])
        except metadata.PackageNotFoundError:  # from another package, or by hand
            return str(import_module(self.packages[0]).__version__)


PEERS = {
    "lightly": Peer(
        title="lightly SimSiamTransform",
        packages=("lightly",),
        install="lightly",
        differs="PIL and torchvision; decoded once. The flip comes before the colours, which "
        "gives the same pixels.",
    ),
    "torchvision-v2": Peer(
        title="torchvision transforms.v2",
        packages=("torchvision",),
        install="torchvision",
        differs="Works on uint8 tensors; decoded once. Blurs with a Gaussian kernel of 13 x 13 "
        "pixels instead of PIL's box blurs.",
    ),
    "spdl": Peer(
        title="SPDL and transforms.v2",
        packages=("spdl.pipeline", "spdl.io"),
        install="spdl, and FFmpeg's libraries",
        differs="Threads; decoded once, by FFmpeg. The rest is torchvision transforms.v2.",
    ),
    "albumentations": Peer(
        title="albumentations",
        packages=("albumentations", "cv2"),
        install="albumentations",
        differs="OpenCV; decoded once. Resizes bilinearly without antialiasing. torchvision's "
        "jitter in random order, on 8 bits, with hue in steps of 2 degrees. Blurs with a Gaussian "
        "kernel of 3.5 sigma to each side.",
    ),
    "dali-solo-learn": Peer(
        title="DALI as in solo-learn",
        packages=("nvidia.dali",),
        install="nvidia-dali-cuda120",
        differs="Decoded once. Crops cover at least 0.08 of the area and are resized with "
        "antialiased bicubic interpolation. Jitter is one linear map (color_twist) in a fixed "
        "order, with contrast around 128 and hue in YIQ. Blurs with a Gaussian kernel of 23 "
        "pixels. Jitter, gray and blur are computed for every view, then kept or dropped.",
    ),
    "slipstream": Peer(
        title="slipstream, SimCLR's preset",
        packages=("slipstream", "libslipstream", "litdata"),
        install="git+https://github.com/harvard-visionlab/slipstream, and libturbojpeg",
        differs="Decoded once, with libjpeg-turbo's fast DCT. Resizes with bicubic interpolation "
        "(stb_image_resize2). The rest runs in float32 on the device, in batches: a jitter in HSV "
        "in a fixed order, and a Gaussian blur of 7 x 7 pixels with one of ten sigmas.",
    ),
    "ffcv-plain": Peer(
        title="FFCV's own operations",
        packages=("ffcv",),
        install="ffcv",
        differs="Crops, flips and normalises only: no jitter, gray or blur. Decodes each image "
        "twice, once per view, with libjpeg-turbo's fast DCT. Resizes by area averages.",
    ),
}
"""The libraries, by name."""


def require_lightly() -> None:
    """Raise ``BackendError`` unless lightly is installed."""
    if missing := PEERS["lightly"].missing:
        raise BackendError(f"lightly is not installed: {missing}")


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
