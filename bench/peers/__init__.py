"""Other libraries that make two views, for ``fastsiam bench peers``: what they are, no torch.

How each is set to work is in a module here of its name, written as its own documentation has it,
with the paper's settings where it lets one choose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastsiam.bench.peers.job import Job, Opened


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One of them."""

    title: str
    """Its name in a table."""
    packages: tuple[str, ...]
    """Modules that it needs."""
    install: str
    """What pip has to install for them."""
    packaged: bool = True
    """Whether a package index has it; otherwise it is installed by hand."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Kinds of devices on which it finishes views."""
    differs: str
    """Where its work is not ours."""

    @property
    def missing(self) -> str | None:
        """How to install it, if a package that it needs is not there."""
        return None if all(map(_is_there, self.packages)) else f"pip install {self.install}"


_SLIPSTREAM = ("slipstream", "libslipstream", "litdata")
_SLIPSTREAM_FROM = "git+https://github.com/harvard-visionlab/slipstream, beside libturbojpeg"

PEERS = {
    "lightly": Peer(
        title="lightly SimSiamTransform",
        packages=("lightly",),
        install="lightly",
        differs="Nothing but the flip's place, before the colours; PIL and torchvision, decoded "
        "once.",
    ),
    "torchvision-v2": Peer(
        title="torchvision transforms.v2",
        packages=("torchvision",),
        install="torchvision",
        differs="Works on uint8 tensors, decoded once; blurs by a Gaussian kernel of 13 x 13 "
        "pixels, not by PIL's boxes.",
    ),
    "spdl": Peer(
        title="SPDL and transforms.v2",
        packages=("spdl.pipeline", "spdl.io"),
        install="spdl, beside FFmpeg's libraries",
        packaged=False,
        differs="Threads; decoded once, by FFmpeg; the rest as in torchvision transforms.v2.",
    ),
    "albumentations": Peer(
        title="albumentations",
        packages=("albumentations", "cv2"),
        install="albumentations",
        differs="OpenCV, decoded once; resizes bilinearly without antialiasing; torchvision's "
        "jitter in random order, on 8 bits, hue in steps of 2 degrees; blurs by a Gaussian kernel "
        "of 3.5 sigma to each side.",
    ),
    "kornia": Peer(
        title="kornia",
        packages=("kornia",),
        install="kornia",
        differs="Decoded once and cropped by PIL in worker processes, the rest in float32 on the "
        "device: torchvision's jitter, but one order for the whole batch and no rounding in "
        "between; blurs by a Gaussian kernel of 13 pixels, not by PIL's boxes.",
    ),
    "dali-solo-learn": Peer(
        title="DALI as in solo-learn",
        packages=("nvidia.dali",),
        install="nvidia-dali-cuda120",
        differs="Crops from 0.08 of the area, resized by antialiased cubics, decoded once; jitter "
        "is one linear map (color_twist) in a fixed order, contrast about 128, hue in YIQ; blurs "
        "by a Gaussian kernel of 23 pixels; jitter, gray and blur are computed for every view and "
        "then chosen or not.",
    ),
    "slipstream": Peer(
        title="slipstream, SimCLR's preset",
        packages=_SLIPSTREAM,
        install=_SLIPSTREAM_FROM,
        packaged=False,
        differs="Decoded once, by libjpeg-turbo's fast DCT; resizes by bicubics "
        "(stb_image_resize2); the rest in float32 on the device, in batches: a jitter in HSV in a "
        "fixed order, a Gaussian blur of 7 x 7 pixels with one of ten sigmas.",
    ),
    "slipstream-crops": Peer(
        title="slipstream, crops alone",
        packages=_SLIPSTREAM,
        install=_SLIPSTREAM_FROM,
        packaged=False,
        differs="Crops, flips and normalises only: no jitter, gray or blur; decoded once, by "
        "libjpeg-turbo's fast DCT; resizes by bicubics (stb_image_resize2).",
    ),
    "torchvision-io": Peer(
        title="torchvision.io and our kernels",
        packages=("torchvision",),
        install="torchvision",
        devices=("cpu",),
        differs="Nothing: torchvision.io decodes each image once, in threads, and this project's "
        "kernels do the rest.",
    ),
    "ffcv-plain": Peer(
        title="FFCV's own operations",
        packages=("ffcv",),
        install="ffcv",
        differs="Crops, flips and normalises only: no jitter, gray or blur; decodes each image "
        "twice, once for each view, by libjpeg-turbo's fast DCT; resizes by area averages.",
    ),
}
"""All of them, by name."""


def starter(name: str) -> Callable[[Job], Opened]:
    """Return what begins a peer's work; it imports the peer's packages when it is called."""
    start: Callable[[Job], Opened] = import_module(f"{__name__}.{name.replace('-', '_')}").start
    return start


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False
