"""BN over ranks that hold different numbers of samples."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests import rank_jobs


def test_statistics_are_those_of_all_samples(ranks: Callable[[str, int], list[object]]) -> None:
    """Five images on one rank, eleven on the other: torch's BN of the sixteen."""
    plain, joint, target = rank_jobs.bn_problem()
    joint.requires_grad_()
    out = plain(joint)
    (out * target).sum().backward()
    parts: list[dict[str, torch.Tensor]] = ranks("uneven_bn", 2)  # type: ignore[assignment]

    def close(made: torch.Tensor, expected: torch.Tensor | None) -> None:
        torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-4)

    close(torch.cat([part["out"] for part in parts]), out.detach())
    close(torch.cat([part["input_gradient"] for part in parts]), joint.grad)
    close(parts[0]["weight_gradient"] + parts[1]["weight_gradient"], plain.weight.grad)
    for part in parts:
        close(part["mean"], plain.running_mean)
        close(part["var"], plain.running_var)
