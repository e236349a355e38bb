"""Supervised training of a ResNet-50 with fastsiam's loader: one view and its label.

python docs/examples/supervised.py /data/imagenet [native|dali|memory]

The settings follow ffcv-imagenet (SGD, label smoothing 0.1, weight decay 1e-4 except for batch
norm), at one resolution, with a learning rate that decays linearly.
"""

import sys

import torch
from torch import nn
from torchvision.models import resnet50

from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.pipelines import ViewLoader, open_split, supervised_batch


def main(
    data: str, pipeline: str = "native", epochs: int = 16, crop: int = 176, batch: int = 256
) -> float:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = DataConfig(data=data, pipeline=pipeline)
    # RandomResizedCrop and a flip; ColorJitter, grayscale and blur are switched off.
    augment = AugmentConfig.alike(
        views=1, crop=crop, scale_min=0.08, jitter_p=0, gray_p=0, blur_p=0
    )
    loader = ViewLoader(source, augment, batch=batch, device=device, transform=supervised_batch)

    model = resnet50(num_classes=len(open_split(source, "train").classes))
    model = model.to(device, memory_format=torch.channels_last)
    norms = {p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()}
    groups = [
        {"params": [p for p in model.parameters() if p not in norms], "weight_decay": 1e-4},
        {"params": list(norms), "weight_decay": 0.0},
    ]
    peak, steps = 0.5 * batch / 256, epochs * len(loader)
    optimizer = torch.optim.SGD(groups, lr=peak, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(epochs):
        for images, labels in loader:
            with torch.autocast(device.type, torch.bfloat16):
                loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")
    loader.close()
    return loss.item()


if __name__ == "__main__":
    main(*sys.argv[1:])
