"""Settings of SwAV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fastsiam.config.checks import require, require_at_least_one, require_one_of, require_positive

from .heads import ProjectedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SwAVConfig(ProjectedConfig):
    """SwAV: its head, its prototypes, and how images are assigned to them."""

    name: ClassVar[str] = "swav"
    title: ClassVar[str] = "SwAV"
    builder: ClassVar[str] = "fastsiam.methods.swav:SwAV"
    paper: ClassVar[str] = (
        "Caron et al., [Unsupervised Learning of Visual Features by Contrasting Cluster "
        "Assignments](https://arxiv.org/abs/2006.09882), NeurIPS 2020"
    )

    prototypes: int = 3000
    """Prototypes that images are assigned to."""
    temperature: float = 0.1
    """Temperature of the softmax over similarities; the smaller, the more the nearest count."""
    epsilon: float = 0.05
    """Entropy of the assignments (Sinkhorn): the smaller, the nearer to one prototype each."""
    sinkhorn_rounds: int = 3
    """Rounds in which the assignments are balanced over the prototypes."""
    frozen_epochs: float = 1.0
    """Epochs in which the prototypes stay as they are initialised."""
    queue: int = 0
    """Projections of earlier batches that are kept, to balance small batches' assignments."""
    queue_from: float = 15.0
    """Epochs before the queue is used."""
    predictor: Literal["trained", "none"] = "none"
    """Predictor: none, or trained on the branch that is compared with the other (65.2 to 66.5)."""
    predictor_dim: int = 512
    """Hidden width of the predictor, if there is one."""
    stop_gradient: bool = True
    """Treat assignments as constant. Without it training diverges in the paper (section 6.2)."""

    def __post_init__(self) -> None:
        super(SwAVConfig, self).__post_init__()
        require_at_least_one(self, "prototypes", "sinkhorn_rounds", "predictor_dim")
        require_positive(self, "temperature", "epsilon")
        require_one_of(self, "predictor", "trained", "none")
        for name in ("frozen_epochs", "queue", "queue_from"):
            value = getattr(self, name)
            require(value >= 0, f"{name.replace('_', '-')} must be 0 or more, not {value}")

    def described(self) -> dict[str, str]:
        """Return its settings for people, by what they are of; those that are in use."""
        said = super(SwAVConfig, self).described()
        del said["predictor dim"]
        if self.predictor == "trained":
            said["predictor"] = f"{self.dim}-{self.predictor_dim}-{self.dim}"
        if not self.queue:
            del said["queue"], said["queue from"]
        return said

    def check_views(self, views: int) -> None:
        """Take two or more: the first two are assigned, and predicted from all others."""
        require(views >= 2, f"swav compares two views of each image or more, not {views}")

    def doubts(self, *, images: int, batch: int, groups: int) -> list[str]:
        """Warn of fewer images than prototypes."""
        if (there := batch + self.queue) >= self.prototypes:
            return []
        return [
            f"{there:,} images cannot be balanced over {self.prototypes:,} prototypes: fewer "
            "--prototypes, or a longer --queue"
        ]
