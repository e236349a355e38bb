"""FastSiam (Pototzky, Sultan and Schmidt-Thieme, GCPR 2022): SimSiam with more than two views."""

from __future__ import annotations

from .simsiam_variants import Comparison, SimSiamVariant


class FastSiam(SimSiamVariant):
    """FastSiam: compares each view's prediction with the mean projection of the other views.

    With two views it is SimSiam.
    """

    def comparisons(self, views: int) -> list[Comparison]:
        """Compare each view with all others; without ``symmetric``, only the first view."""
        all_views = tuple(range(views))
        predicting_views = all_views if self.config.symmetric else all_views[:1]
        return [(view, all_views[:view] + all_views[view + 1 :]) for view in predicting_views]
