"""Two-view batches of fastsiam in Lightning, on one GPU or several.

python docs/examples/lightning_module.py /data/imagenet [dali|ffcv|torchvision|memory]
"""

import sys
from collections.abc import Iterator

import lightning
import torch
from torch.nn import functional as F
from torchvision.models import resnet18

from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.pipelines import build_loader
from fastsiam.views.batch import Batch, Loader


class Epochs:
    """What Lightning iterates over: each time it is iterated, the next epoch."""

    def __init__(self, loader: Loader, first: int = 0) -> None:
        self.loader, self.epoch = loader, first

    def __len__(self) -> int:
        return self.loader.steps

    def __iter__(self) -> Iterator[Batch]:
        self.epoch += 1
        return self.loader.epoch(self.epoch - 1)


class SimSiam(lightning.LightningModule):
    def __init__(self, data: DataConfig, augment: AugmentConfig, batch: int) -> None:
        super().__init__()
        self.data, self.augment, self.batch = data, augment, batch
        self.encoder = resnet18(num_classes=256)
        self.predictor = torch.nn.Sequential(
            torch.nn.Linear(256, 64), torch.nn.ReLU(), torch.nn.Linear(64, 256)
        )

    def train_dataloader(self) -> Epochs:
        loader = build_loader(
            self.data,
            self.augment,
            batch=self.batch,
            rank=self.global_rank,  # the loader shares out the batch: no DistributedSampler
            world=self.trainer.world_size,
            device=self.device,
        )
        return Epochs(loader, first=self.trainer.current_epoch)

    def transfer_batch_to_device(self, batch: Batch, *_: object) -> Batch:
        return batch  # it is there already

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        z1, z2 = self.encoder(batch.view1), self.encoder(batch.view2)
        p1, p2 = self.predictor(z1), self.predictor(z2)
        similarity = F.cosine_similarity(p1, z2.detach()) + F.cosine_similarity(p2, z1.detach())
        loss = -similarity.mean() / 2
        self.log("loss", loss, prog_bar=True, batch_size=len(batch.index))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def main(data: str, pipeline: str = "torchvision", epochs: int = 10, crop: int = 224) -> float:
    lightning.seed_everything(0)
    augment = AugmentConfig.alike(crop=crop)
    module = SimSiam(DataConfig(data=data, pipeline=pipeline), augment, batch=16)
    trainer = lightning.Trainer(
        max_epochs=epochs, logger=False, enable_checkpointing=False, use_distributed_sampler=False
    )
    trainer.fit(module)
    return float(trainer.callback_metrics["loss"])


if __name__ == "__main__":
    main(*sys.argv[1:])
