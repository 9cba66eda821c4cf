"""A start without gradients: reorder heads, fold the mean rotation into the queries, and match biases to distances.

The stock model shows how much attention each head pays to each distance. That is enough to start a variant much closer
to the stock model than its raw weights are, if biases replace the architecture's own encoding.

Shape legend: B batch, N tokens, H heads, D head size, K buckets, L = 2N - 1 distances, from -(N - 1) to N - 1.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.nn import functional
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.utils import logging

from ..attention import LayerSchemes
from ..checkpoints import eval_mode, is_scheme_parameter
from ..patches import HeadLayout, PosEncAttention, find_head_layout
from ..schemes import DistanceBias, Kind, Positions
from ..schemes.functional import distance_buckets
from .attention_targets import LayerTarget, StockAttention, check_input_ids, paired_bases
from .head_matching import bias_divergence, match_fixed, match_shared
from .optimizer import minimize

logger = logging.get_logger(__name__)
HeadOrders = list[dict[int, torch.Tensor]]
"""For each base model and each reordered layer: the index that each head had before."""
NUM_BUCKETS, MAX_DISTANCE, MATCHING_ROUNDS, SMOOTHING = 32, 128, 12, 0.5
FIT_STEPS, FIT_LEARNING_RATE = 300, 0.1
"""For fitting the parameters of a scheme to a bias by distance, which does not run the model."""
FOLD_TOLERANCE = 1e-3


@torch.no_grad()
def closed_form_start(
    stock_model: PreTrainedModel,
    variant: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    reorder_heads: bool = True,
    fold_rotation: bool = True,
    match_biases: bool = True,
    progress: bool = False,
) -> HeadOrders:
    """Start a variant from the attention of its stock model, without gradients of the model.

    Only layers in which the variant does not rotate and has no terms that depend on the content are changed. If an
    architecture's attention weights have a form that is not known, only biases are matched.

    Args:
        stock_model: The model that the variant was made from.
        variant: The model with the new position scheme; changed in place.
        input_ids: A little text, token ids of shape (batch, length); a dozen rows of 128 tokens are enough.
        reorder_heads: Reorder the heads of each layer, so that each gets the bias that suits it best, if biases are
            fixed or shared by all layers. Reordering changes nothing that the model computes from content.
        fold_rotation: Multiply queries by the mean rotation between them and the keys that they attend to.
        match_biases: Set the parameters of biases so that each head attends to each distance as much as before.
        progress: Show progress bars.

    Returns:
        How heads were reordered, for `fit`.

    Raises:
        PosEncError: If the models do not belong together or `input_ids` cannot be used.

    Example:
        >>> head_orders = closed_form_start(stock_model, variant, input_ids)
        >>> hf_posenc.fit(stock_model, variant, input_ids, projections=True, head_orders=head_orders)
    """
    check_input_ids(input_ids)
    head_orders: HeadOrders = []
    with eval_mode(variant):
        for stock_base, base in paired_bases(stock_model, variant):
            start = _ClosedForm(StockAttention(stock_base, base), input_ids.to(base.device), progress)
            start.visit_layers(fold_rotation)
            head_orders.append(start.reorder_heads() if reorder_heads else {})
            if match_biases:
                start.match_biases()
    return head_orders


@dataclasses.dataclass(frozen=True)
class _DistanceTarget:
    """How much a layer's heads should attend to each distance, and the bias that achieves it."""

    mass_HL: torch.Tensor
    bias_HL: torch.Tensor

    def of_heads(self, order: torch.Tensor) -> _DistanceTarget:
        return _DistanceTarget(self.mass_HL[order], self.bias_HL[order])


class _ClosedForm:
    """The start of one base model."""

    def __init__(self, stock_attention: StockAttention, input_ids: torch.Tensor, progress: bool) -> None:
        self.stock_attention, self.input_ids, self.progress = stock_attention, input_ids, progress
        base, architecture = stock_attention.base, stock_attention.base.architecture
        self.shape = architecture.shape(base.config)
        self.positions = stock_attention.variant_positions(input_ids)
        layers = base.get_submodule(architecture.layers).children()
        self.layouts = [find_head_layout(layer, architecture, self.shape) for layer in layers]
        if None in self.layouts:
            logger.warning_once(f"Heads of {architecture.model_type} cannot be reordered: only biases are matched")
        self.num_tokens = input_ids.shape[1]
        slots = torch.arange(self.num_tokens, device=input_ids.device)
        self.distance_index_NN = slots - slots[:, None] + self.num_tokens - 1
        distances_L = torch.arange(1 - self.num_tokens, self.num_tokens, device=input_ids.device)
        self.buckets_L = distance_buckets(distances_L, NUM_BUCKETS, MAX_DISTANCE, not self.shape.causal)
        self.targets: dict[int, _DistanceTarget] = {}

    def visit_layers(self, fold_rotation: bool) -> None:
        """Fold the rotation of each layer that loses it, and find the bias that each layer should have."""

        def visit(target: LayerTarget) -> None:
            bar.update()
            attention = self.stock_attention.attentions[target.layer]
            active = attention.layer_schemes(self.positions)
            depends_on_content = any(item.scheme.kind is not Kind.DISTANCE for item in active.score)
            if active.rotate or active.stock_rotation or depends_on_content:
                return
            mass_HL = self._sum_by_distance(target.log_weights.exp())
            layout = self.layouts[target.layer]
            if fold_rotation and layout is not None:
                self._fold_rotation(target, attention, layout, mass_HL)
            if active.score:
                bias_HL = self._matching_bias(target, attention, mass_HL)
                self.targets[target.layer] = _DistanceTarget(mass_HL, bias_HL)

        with tqdm(total=len(self.layouts), desc="Reading attention", unit="layer", disable=not self.progress) as bar:
            self.stock_attention.visit_layers(self.input_ids, visit)

    def _sum_by_distance(self, weights: torch.Tensor) -> torch.Tensor:
        """The sums of attention weights over all pairs at the same distance, (H, L). Sinks do not count."""
        weights_HN = weights[..., : self.num_tokens].sum(0).flatten(1).float()
        sums_HL = weights_HN.new_zeros(len(weights_HN), 2 * self.num_tokens - 1)
        return sums_HL.index_add_(1, self.distance_index_NN.flatten(), weights_HN)

    def _fold_rotation(
        self, target: LayerTarget, attention: PosEncAttention, layout: HeadLayout, mass_HL: torch.Tensor
    ) -> None:
        rotations_NDD = self.stock_attention.rotations(target.layer, self.input_ids)
        if rotations_NDD is None:
            return
        # Between a query and an earlier key there is the rotation R(0)^T R(r); between it and a later one, the inverse.
        earlier_NDD = rotations_NDD[0].T @ rotations_NDD
        by_distance_LDD = torch.cat([earlier_NDD.flip(0), earlier_NDD[1:].transpose(1, 2)])
        share_HL = mass_HL / mass_HL.sum(-1, keepdim=True)
        mean_HDD = torch.einsum("hl,lde->hde", share_HL, by_distance_LDD)
        query_BHND = attention.project(target.content_BNE).query_BHND
        expected = torch.einsum("hde,bhne->bhnd", mean_HDD.to(query_BHND), query_BHND)
        before = [(rows.parameter, rows.parameter.clone()) for rows in layout.rows]
        layout.transform_queries(mean_HDD)
        error = (attention.project(target.content_BNE).query_BHND - expected).norm() / expected.norm()
        if not error < FOLD_TOLERANCE:  # a norm after the projection undoes part of it
            for parameter, value in before:
                parameter.copy_(value)

    def _matching_bias(self, target: LayerTarget, attention: PosEncAttention, mass_HL: torch.Tensor) -> torch.Tensor:
        """The bias by distance with which a layer attends to each distance as much as the stock layer, (H, L)."""
        in_bucket_LK = functional.one_hot(self.buckets_L, NUM_BUCKETS).float()
        stock_mass_HK = mass_HL @ in_bucket_LK + SMOOTHING
        bias_HK = torch.zeros_like(stock_mass_HK)
        for _ in range(MATCHING_ROUNDS):
            bias = bias_HK[:, self.buckets_L[self.distance_index_NN]]
            log_weights = self.stock_attention.log_weights(
                attention, target.content_BNE, self.positions, target.mask, bias
            )
            mass_HK = self._sum_by_distance(log_weights.exp()) @ in_bucket_LK + SMOOTHING
            bias_HK = bias_HK + stock_mass_HK.log() - mass_HK.log()
            bias_HK = bias_HK - bias_HK.mean(-1, keepdim=True)
        return bias_HK[:, self.buckets_L]

    def reorder_heads(self) -> dict[int, torch.Tensor]:
        """Give each bias that is fixed, or shared by all layers, the head that suits it best."""
        orders: dict[int, torch.Tensor] = {}
        shared: list[int] = []
        for layer, target in self.targets.items():
            score, layout, bias_HL = self._active(layer).score, self.layouts[layer], self._bias(layer, self.positions)
            if layout is None or bias_HL is None or any(item.layer_params for item in score):
                continue
            if any(True for item in score for _ in item.scheme.parameters()):
                shared.append(layer)
            else:
                orders[layer] = match_fixed(target.bias_HL, target.mass_HL, bias_HL, layout.group_size)
        if shared:
            biases, masses = zip(*((self.targets[i].bias_HL, self.targets[i].mass_HL) for i in shared), strict=True)
            group_size = max(layout.group_size for layout in self.layouts if layout is not None)
            orders |= zip(shared, match_shared(biases, masses, group_size), strict=True)
        for layer, order in orders.items():
            layout = self.layouts[layer]
            assert layout is not None
            layout.reorder(order)
            self.targets[layer] = self.targets[layer].of_heads(order)
        return orders

    def match_biases(self) -> None:
        """Set the schemes' parameters so that their biases come as close as possible to those of the targets."""
        parameters = [
            parameter for name, parameter in self.stock_attention.base.named_parameters() if is_scheme_parameter(name)
        ]
        with torch.enable_grad():  # without gradients, schemes prepare biases from their present parameters
            positions = self.stock_attention.variant_positions(self.input_ids[:1])
        layers = [layer for layer in self.targets if self._bias(layer, positions) is not None]
        if layers and parameters:
            groups = [{"params": parameters, "lr": FIT_LEARNING_RATE}]
            label = "Matching biases" if self.progress else None
            minimize(lambda step: self._bias_loss(layers, positions), groups, FIT_STEPS, label)

    def _bias_loss(self, layers: list[int], positions: Positions) -> torch.Tensor:
        losses = []
        for layer in layers:
            bias_HL, target = self._bias(layer, positions), self.targets[layer]
            assert bias_HL is not None
            losses.append(bias_divergence(bias_HL.float(), target.bias_HL, target.mass_HL).sum())
        return torch.stack(losses).sum()

    def _bias(self, layer: int, positions: Positions) -> torch.Tensor | None:
        """The total bias of the variant's schemes in a layer, (H, L); None if they add more than a bias by distance."""
        terms = [
            item.scheme("score", item.prepared, item.layer_params, None)
            for item in self._active(layer, positions).score
        ]
        biases = [term.values for term in terms if isinstance(term, DistanceBias)]
        return torch.stack(biases).sum(0) if biases and len(biases) == len(terms) else None

    def _active(self, layer: int, positions: Positions | None = None) -> LayerSchemes:
        return self.stock_attention.attentions[layer].layer_schemes(positions or self.positions)
