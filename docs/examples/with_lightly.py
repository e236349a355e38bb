"""lightly's SimSiam with fastsiam's loader in place of its dataset, transform and DataLoader.

python docs/examples/with_lightly.py /data/imagenet [native|dali|memory]
"""

import sys

import torch
from lightly.loss import NegativeCosineSimilarity
from lightly.models.modules import SimSiamPredictionHead, SimSiamProjectionHead
from torch import nn
from torchvision.models import resnet18

from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.pipelines import ViewLoader, lightly_batch


def main(data: str, pipeline: str = "native", epochs: int = 10, crop: int = 224) -> float:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backbone = resnet18()
    backbone.fc = nn.Identity()
    encoder = nn.Sequential(backbone, SimSiamProjectionHead(512, 512, 128)).to(device)
    predictor = SimSiamPredictionHead(128, 64, 128).to(device)
    criterion = NegativeCosineSimilarity()
    parameters = [*encoder.parameters(), *predictor.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.06, momentum=0.9, weight_decay=5e-4)

    source, augment = DataConfig(data=data, pipeline=pipeline), AugmentConfig.alike(crop=crop)
    loader = ViewLoader(source, augment, batch=16, device=device, transform=lightly_batch)

    for epoch in range(epochs):
        total = 0.0
        for step, (views, _targets, _filenames) in enumerate(loader, 1):
            z0, z1 = map(encoder, views)
            p0, p1 = map(predictor, (z0, z1))
            loss = 0.5 * (criterion(z0.detach(), p1) + criterion(z1.detach(), p0))
            total += loss.item()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                print(f"epoch {epoch}, batch {step} of {len(loader)}: loss {loss.item():.3f}")
        print(f"epoch {epoch}: loss {total / len(loader):.3f}")
    mean = total / len(loader)
    loader.close()
    return mean


if __name__ == "__main__":
    main(*sys.argv[1:])
