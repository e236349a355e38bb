"""FastSiam (Pototzky, Sultan and Schmidt-Thieme, GCPR 2022): SimSiam with more than two views."""

from __future__ import annotations

from .simsiam_variants import Comparison, SimSiamVariant


class FastSiam(SimSiamVariant):
    """Each view's prediction against the mean of the other views' projections.

    With two views it is SimSiam.
    """

    def comparisons(self, views: int) -> list[Comparison]:
        """Compare every view with all others, or the first alone with them."""
        every = tuple(range(views))
        predicted = every if self.config.symmetric else every[:1]
        return [(view, every[:view] + every[view + 1 :]) for view in predicted]
