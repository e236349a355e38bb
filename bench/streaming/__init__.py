"""Other libraries that stream from object storage, for ``fastsiam bench storage``; no torch.

Each has a module here of its name. All decode and make both views as torchvision's
``transforms.v2`` does, in worker processes.
"""

from __future__ import annotations

from fastsiam.bench.peers import Peer

STREAMING = {
    "webdataset": Peer(
        title="webdataset",
        packages=("webdataset",),
        install="webdataset",
        devices=("cpu",),
        differs="Reads whole shards one after the other, by curl; keeps whole shards; decodes and "
        "makes views by torchvision's transforms.v2.",
    ),
    "litdata": Peer(
        title="litdata",
        packages=("litdata", "boto3"),
        install="litdata boto3",
        devices=("cpu",),
        differs="Reads shards of its own form, of 32 MiB, whole, by boto3, and keeps them on disk "
        "in any case; decodes and makes views by torchvision's transforms.v2.",
    ),
}
"""All of them, by name."""
