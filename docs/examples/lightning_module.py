"""SimSiam in Lightning with fastsiam's loader, on one or more GPUs, with mid-epoch resume.

python docs/examples/lightning_module.py /data/imagenet [native|dali|memory]
"""

import sys

import lightning
import torch
from torch.nn import functional as F
from torchvision.models import resnet18

from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.pipelines import ViewLoader
from fastsiam.views.batch import Batch


class Views(lightning.LightningDataModule):
    """Batches of two views; Lightning's checkpoints store the loader's position."""

    def __init__(self, data: str, pipeline: str, crop: int, batch: int) -> None:
        super().__init__()
        self.source = DataConfig(data=data, pipeline=pipeline)
        self.augment, self.batch = AugmentConfig.alike(crop=crop), batch

    def train_dataloader(self) -> ViewLoader:
        device = self.trainer.strategy.root_device
        return ViewLoader(self.source, self.augment, batch=self.batch, device=device)


class SimSiam(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = resnet18(num_classes=256)
        self.predictor = torch.nn.Sequential(
            torch.nn.Linear(256, 64), torch.nn.ReLU(), torch.nn.Linear(64, 256)
        )

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        z1, z2 = self.encoder(batch.view1), self.encoder(batch.view2)
        p1, p2 = self.predictor(z1), self.predictor(z2)
        similarity = F.cosine_similarity(p1, z2.detach()) + F.cosine_similarity(p2, z1.detach())
        loss = -similarity.mean() / 2
        self.log("loss", loss, prog_bar=True, batch_size=len(batch.index))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def main(data: str, pipeline: str = "native", epochs: int = 10, crop: int = 224) -> float:
    lightning.seed_everything(0)
    trainer = lightning.Trainer(max_epochs=epochs, logger=False, enable_checkpointing=False)
    trainer.fit(SimSiam(), Views(data, pipeline, crop, batch=16))
    return float(trainer.callback_metrics["loss"])


if __name__ == "__main__":
    main(*sys.argv[1:])
