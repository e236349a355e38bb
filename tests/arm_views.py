"""Compare the engine's crops and views bit for bit between CPU architectures.

Run `python -m tests.arm_views save FILE` on one architecture, which saves images with their views.
Then run `python -m tests.arm_views compare FILE` on the other.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from numpy.typing import NDArray

from fastsiam.config import AugmentConfig
from fastsiam.config.views import ViewConfig
from fastsiam.pipelines.cuts import cut_views
from fastsiam.pipelines.engine import Engine
from fastsiam.pipelines.job import stages_of
from fastsiam.views.batch import crop_shapes
from fastsiam.views.draws import draw_views
from tests.fuzz.encoded_images import images
from tests.pipelines.cases import ListStore

_CONFIG = AugmentConfig(
    views=(ViewConfig(crop=32, solarise_p=0.3), ViewConfig(crop=32), ViewConfig(crop=17))
)
_EPOCHS = 20
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def results(encoded: list[bytes]) -> dict[str, NDArray[np.generic]]:
    """Compute the drawn view parameters, crops and views of encoded images, as named arrays."""
    store, index, arrays = ListStore(encoded), np.arange(len(encoded)), {}
    engine = Engine(store, workers=2)
    for epoch in range(_EPOCHS):
        batch = engine.read(index)
        params = draw_views(_CONFIG, seed=0, epoch=epoch, index=index, size=batch.size)
        for name in params.__slots__:
            arrays[f"{epoch} drawn {name}"] = getattr(params, name)
        cuts = cut_views(params, _CONFIG)
        crops = tuple(torch.empty(s, dtype=torch.uint8) for s in crop_shapes(_CONFIG, len(index)))
        engine.submit(index, batch, cuts, crops=crops).result()
        for side, crop in zip(_CONFIG.by_side, crops, strict=True):
            arrays[f"{epoch} crops {side}"] = crop.numpy()
        for dtype in _TYPES:
            stages = stages_of(params, _CONFIG, dtype)
            engine.submit(index, batch, cuts, stages=stages).result()
            for side, stage in zip(_CONFIG.by_side, stages, strict=True):
                views = stage.views().contiguous().view(torch.uint8)
                arrays[f"{epoch} views {side} {dtype}"] = views.numpy().copy()
    engine.close()
    return arrays


def main(action: str, path: str) -> int:
    """Save or compare; return exit code 1 if an array differs."""
    if action == "save":
        encoded = images()
        np.savez(path, *(np.frombuffer(x, np.uint8) for x in encoded), **results(encoded))  # type: ignore[arg-type]
        return 0
    with np.load(path) as saved:
        encoded_images = [saved[f"arr_{i}"].tobytes() for i in range(len(images()))]
        arrays = results(encoded_images)
        differ = [name for name, array in arrays.items() if not np.array_equal(array, saved[name])]
    print(
        f"{len(arrays)} arrays of {len(encoded_images)} images, {len(differ)} differ: {differ[:9]}"
    )
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
