"""SimCLR in a plain PyTorch training loop, with two-view batches from fastsiam.

python docs/examples/plain_loop.py /data/imagenet [native|dali|memory]
"""

import sys

import torch
from torch.nn import functional as F
from torchvision.models import resnet18

from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.pipelines import ViewLoader


def main(data: str, pipeline: str = "native", epochs: int = 10, crop: int = 224) -> float:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = resnet18(num_classes=128).to(device, memory_format=torch.channels_last)
    augment = AugmentConfig.alike(crop=crop, scale_min=0.08, brightness=0.8, contrast=0.8)
    source = DataConfig(data=data, pipeline=pipeline)
    loader = ViewLoader(source, augment, batch=16, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for batch in loader:
            z = F.normalize(model(torch.cat([batch.view1, batch.view2])))
            n = len(batch.index)
            similarity = (z @ z.T / 0.2).fill_diagonal_(-torch.inf)
            loss = F.cross_entropy(similarity, torch.arange(2 * n, device=device).roll(n))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}: loss {loss.item():.3f}")
    loader.close()
    return loss.item()


if __name__ == "__main__":
    main(*sys.argv[1:])
