"""Settings of the projection head that every related method has."""

from __future__ import annotations

from dataclasses import dataclass

from fastsiam.config.checks import require_at_least_one

from .base import MethodConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedConfig(MethodConfig):
    """A method that compares projections."""

    projector_layers: int = 3
    """Layers of the projection MLP (3 for ImageNet, 2 for CIFAR-10)."""
    dim: int = 128
    """Dimension of the projector's output."""
    projector_dim: int = 2048
    """Width of the projector's hidden layers."""

    def __post_init__(self) -> None:
        require_at_least_one(self, "projector_layers", "dim", "projector_dim")

    @property
    def hidden_widths(self) -> list[int]:
        """Widths of the projector's hidden layers."""
        return [self.projector_dim] * (self.projector_layers - 1)

    def described(self) -> dict[str, str]:
        """Return its settings for people, by what they are of; the projector's in one."""
        layers = f"{self.projector_layers} layers, {self.projector_dim} wide, to {self.dim}"
        said = super(ProjectedConfig, self).described()
        for name in ("projector layers", "dim", "projector dim"):
            del said[name]
        return {"projector": layers} | said
