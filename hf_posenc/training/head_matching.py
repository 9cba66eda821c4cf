"""Assign heads to biases: which head of a layer should get which bias by distance.

Heads of a layer can be reordered without changing what it computes. With biases that differ by head and cannot adapt,
or are shared by all layers, the order matters.

Shape legend: H heads, P places (one per head), L distances.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import PosEncError, install_command

SHARED_ROUNDS = 6
UNSEEN_SHARE = 1e-6


def bias_divergence(bias: torch.Tensor, wanted: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """How far attention by distance moves if a head gets another bias than the one it wants, in nats.

    Args:
        bias: The bias at each distance, (..., L).
        wanted: The bias with which the head attends to distances as it should; a constant does not matter.
        mass: How much it then attends to each distance; unseen distances count a little.

    Returns:
        The KL divergence between the distributions of attention over distances, (...).
    """
    share = mass / mass.sum(-1, keepdim=True) + UNSEEN_SHARE
    share = share / share.sum(-1, keepdim=True)
    difference = bias - wanted
    return (share.log() + difference).logsumexp(-1) - (share * difference).sum(-1)


def match_fixed(
    wanted_HL: torch.Tensor, mass_HL: torch.Tensor, biases_PL: torch.Tensor, group_size: int
) -> torch.Tensor:
    """Find the order of heads in which each gets the fixed bias that is closest to the one it wants.

    Args:
        wanted_HL: The bias by distance that each head should have; a constant does not matter.
        mass_HL: How much each head attends to each distance, which weighs the differences.
        biases_PL: The bias that each place has.
        group_size: Heads that share a key. They stay together.

    Returns:
        The index of the head for each place, (P,).
    """
    cost_HP = bias_divergence(biases_PL[None], wanted_HL[:, None], mass_HL[:, None])
    return _assign_groups(cost_HP, group_size)


def match_shared(wanted: Sequence[torch.Tensor], masses: Sequence[torch.Tensor], group_size: int) -> list[torch.Tensor]:
    """Find the order of heads in each layer in which the heads at one place want similar biases in all layers.

    For arguments and results, see `match_fixed`; here they have an entry for each layer.
    """
    masses = [mass / mass.sum(-1, keepdim=True) for mass in masses]
    centered = [bias - (mass * bias).sum(-1, keepdim=True) for bias, mass in zip(wanted, masses, strict=True)]
    orders = [torch.arange(len(bias), device=bias.device) for bias in wanted]
    for _ in range(SHARED_ROUNDS if len(wanted) > 1 else 0):
        for layer in range(len(wanted)):
            others = [index for index in range(len(wanted)) if index != layer]
            mass = torch.stack([masses[index][orders[index]] for index in others])
            bias = torch.stack([centered[index][orders[index]] for index in others])
            mean_PL = (mass * bias).sum(0) / mass.sum(0).clamp(min=1e-9)
            orders[layer] = match_fixed(wanted[layer], masses[layer], mean_PL, group_size)
    return orders


def _assign_groups(cost_HP: torch.Tensor, group_size: int) -> torch.Tensor:
    """The cheapest assignment of heads to places that keeps groups together: first within each pair of groups."""
    num_groups = len(cost_HP) // group_size
    blocks = cost_HP.double().view(num_groups, group_size, num_groups, group_size).transpose(1, 2).cpu()
    assigned = [[_assign(blocks[group, place]) for place in range(num_groups)] for group in range(num_groups)]
    slots = torch.arange(group_size)
    totals = [[blocks[g, p][assigned[g][p], slots].sum() for p in range(num_groups)] for g in range(num_groups)]
    groups = _assign(torch.tensor(totals))
    order = [assigned[group][place] + group * group_size for place, group in enumerate(groups.tolist())]
    return torch.cat(order).to(cost_HP.device)


def _assign(cost_HP: torch.Tensor) -> torch.Tensor:
    """The index of the row for each column, at the lowest total cost."""
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise PosEncError(f"Reordering heads requires SciPy: {install_command('train')}") from error
    columns, rows = linear_sum_assignment(cost_HP.T.numpy())
    return torch.as_tensor(rows)[torch.as_tensor(columns).argsort()]
