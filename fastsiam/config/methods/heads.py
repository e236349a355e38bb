"""Settings of the projection head that every related method has."""

from __future__ import annotations

from dataclasses import dataclass

from fastsiam.config.setting import setting

from .base import MethodConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedConfig(MethodConfig):
    """A method that compares projections."""

    projector_layers: int = setting(
        3, "Layers of the projection MLP (3 for ImageNet, 2 for CIFAR-10).", at_least=1
    )
    dim: int = setting(128, "Dimension of the projector's output.", at_least=1)
    projector_dim: int = setting(2048, "Width of the projector's hidden layers.", at_least=1)

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
