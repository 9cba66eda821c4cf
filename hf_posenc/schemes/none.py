"""No position signal at all (NoPE)."""

from .base import Kind, Scheme


class NoPositions(Scheme):
    """No position signal: a causal model still sees order through its mask, an encoder does not."""

    name = "none"
    paper = "Kazemnejad et al. 2023, https://arxiv.org/abs/2305.19466"
    kind = Kind.NOTHING
    formula = "q.k / sqrt(d)"
    cost = "nothing"
    neutral = "no parameters"
    extends = True
