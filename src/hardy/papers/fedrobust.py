"""FedRobust: training against the worst affine shift of each client's device.

Reisizadeh et al., Robust Federated Learning: The Case of Affine Distribution Shifts, NeurIPS 2020 (FLRA), Algorithm 1.

w weights · ψ = (Λ, δ) the affine shift of client i · η₁ descent rate, η₂ ascent step · λ multiplier · τ local steps
f(w, ψ) = loss on x·Λ + δ − λ‖Λ − I‖²_F − λ‖δ‖²                                                      (equation 5)
1. Client i takes one gradient of f on a batch and moves both players from the same point:            (lines 1, 2)
   ψ ← ψ + η₂ ∇_ψ f, w ← w − η₁ ∇_w f.
2. After τ such steps it sends w, never ψ, from which it goes on in the next round.                   (line 3)
3. The server takes the mean of w.                                                                    (line 4)

Λ is kept as D = Λ − I: x·Λ + δ = x + x·D + δ is x itself, bit for bit, before the first step.
"""

import math
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hardy.core import tensors
from hardy.core.method import Method
from hardy.core.metric import Diagnosis, DiagnosisContext
from hardy.core.net import Net
from hardy.core.protocols import Batch, Norm, Objective, Optimiser, Setting, Wrapper, walk
from hardy.core.tensors import ImageShape, Tensors, select
from hardy.errors import HardyError, unknown
from hardy.papers.flra_theory import conclude, probe, wasserstein_bound
from hardy.parts.norms import batch
from hardy.parts.objectives import cross_entropy
from hardy.parts.optimisers import sgd
from hardy.registry import part

Structure = Literal["full", "block", "channel", "low_rank", "diagonal", "identity"]
_MAX_ENTRIES = 1 << 28
"""of the largest Λ a client may keep: 1 GiB in float32"""


@part("objective")
@dataclass(frozen=True, kw_only=True)
class Shifted(Wrapper):
    """The inner objective on x·Λ + δ, with a step of ascent on the client's own Λ and δ in every step.

    Every structure keeps Λ − I to a linear subspace of the d x d matrices, in orthonormal coordinates: lengths,
    penalties and steps mean the same for all of them.
    """

    inner: Objective = cross_entropy()
    structure: Structure = "full"
    """of Λ. full: d x d · block: a full one for each patch · channel: one mix of the channels for all pixels ·
    low_rank: I + UVᵀ, U the lowest frequencies of each channel · diagonal · identity: δ alone (universal adversarial
    training)"""
    size: int = 4
    """side of a patch (block), or frequencies a channel (low_rank)"""
    centre: float = 0.0
    """the grey that Λ leaves where it is: 0 black, 0.5 that of images scaled to [-1, 1] (the authors' CIFAR-10)"""
    step: float = 0.05
    """η₂, the rate of the ascent on the shift"""
    offset_step: float | None = None
    """η₂ of δ; absent: the same"""
    multiplier: float = 2.0
    """λ, the price of a shift: the larger, the smaller the shifts"""
    offset_multiplier: float | None = None
    """λ of δ; absent: the same"""
    ascend_every: int = 1
    """descent steps a step of ascent: the other reading of τ, "minimisation steps per training iteration" """

    def __post_init__(self) -> None:
        if self.structure not in get_args(Structure):
            raise unknown("structure", self.structure, get_args(Structure))
        for name, (step, multiplier) in zip("Λδ", self.rates.values(), strict=True):
            if not (0 <= step < math.inf and 0 <= multiplier < math.inf):
                raise HardyError(f"step and multiplier of {name} are {step} and {multiplier}; both must be 0 or more.")
            if step * multiplier > 1:
                raise HardyError(
                    f"step times multiplier (η₂λ) of {name} is {step * multiplier:g}; above 1 the penalty alone makes "
                    f"the ascent diverge. Take a step of {0.5 / multiplier:g} or less."
                )
        if not 0 <= self.centre <= 1:
            raise HardyError(f"centre is {self.centre}; it is a grey from 0 (black) to 1 (white).")
        if self.size < 1 or self.ascend_every < 1:
            raise HardyError(f"size is {self.size}, ascend_every {self.ascend_every}; both must be 1 or more.")
        if self.size != type(self).size and self.structure not in ("block", "low_rank"):
            raise HardyError(
                f"size is {self.size}, but only structures block and low_rank have one, not {self.structure!r}: it has "
                "no effect. Leave it out, or change the structure."
            )

    @property
    def rates(self) -> dict[str, tuple[float, float]]:
        """η₂ and λ of each tensor of ψ."""
        step, multiplier = self.offset_step, self.offset_multiplier
        of_offset = self.step if step is None else step, self.multiplier if multiplier is None else multiplier
        return {"shift.matrix": (self.step, self.multiplier), "shift.offset": of_offset}

    @property
    def has_adversary(self) -> bool:
        return True

    def private(self, shape: ImageShape, batch: int) -> Tensors:
        if len(shape) != 3:
            raise HardyError(f"an affine shift needs images, but the data are vectors of {shape[0]} features.")
        channels, height, width = shape
        if self.structure == "block" and (height % self.size or width % self.size):
            raise HardyError(f"patches of {self.size}x{self.size} do not tile images of {height}x{width}; change size.")
        if self.structure == "low_rank" and self.size > min(height, width):
            raise HardyError(f"size is {self.size}; images of {height}x{width} have at most {min(height, width)}.")
        patch = (channels, self.size, self.size)
        d = math.prod(shape)
        sizes: dict[str, tuple[int, ...]] = {
            "full": (d, d),
            "block": (height // self.size, width // self.size, *patch, *patch),
            "channel": (channels, channels),
            "low_rank": (channels, self.size, *shape),
            "diagonal": shape,
        }
        matrix = sizes.get(self.structure, ())
        if math.prod(matrix) > _MAX_ENTRIES:
            raise HardyError(
                f"a {self.structure} Λ for images of {d} values has {math.prod(matrix)} entries; the limit is "
                f"{_MAX_ENTRIES}. Take structure channel, diagonal or low_rank, or block with a smaller size."
            )
        first = {"shift.matrix": torch.zeros(matrix), "shift.offset": torch.zeros(shape)}
        counter = {"shift.turn": torch.zeros(())} if self.ascend_every > 1 else {}
        return {**self.inner.private(shape, batch), **first, **counter}

    def shift(self, private: Tensors, x: Tensor) -> Tensor:
        """x·Λ + δ about the centre, not clipped to [0, 1]."""
        moved, matrix, x = x + private["shift.offset"], private["shift.matrix"], x - self.centre
        match self.structure:
            case "full":
                return moved + (x.flatten(1) @ matrix).view(x.shape)
            case "block":
                rows, columns, channels, side = matrix.shape[:4]
                tiles = x.reshape(-1, channels, rows, side, columns, side)
                return moved + torch.einsum("ncaibj,abcijekl->neakbl", tiles, matrix).reshape(x.shape)
            case "channel":
                pixels = x[0, 0].numel()  # an entry stands in the d x d matrix once for each of them
                return moved + torch.einsum("nchw,ck->nkhw", x, matrix) / math.sqrt(pixels)
            case "low_rank":
                coarse = torch.einsum("nchw,fhw->ncf", x, _waves(self.size, x))
                return moved + torch.einsum("ncf,cfehw->nehw", coarse, matrix)
            case "diagonal":
                return moved + x * matrix
            case "identity":
                return moved

    def lengths(self, private: Tensors) -> tuple[Tensor, Tensor]:
        """‖Λ − I‖²_F and ‖δ‖²."""
        return private["shift.matrix"].square().sum(), private["shift.offset"].square().sum()

    def price(self, private: Tensors) -> Tensor:
        """λ‖Λ − I‖²_F + λ‖δ‖², which the ascent pays; it is no part of the loss reported."""
        return torch.stack([self.rates[n][1] * t.square().sum() for n, t in _psi(private).items()]).sum()

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        return self.inner.loss(net, private, batch._replace(x=self.shift(private, batch.x)), key)

    def ascend(self, psi: Tensors, slope: Tensors) -> Tensors:
        """ψ + η₂ ∇_ψ f."""
        return {n: torch.add(t, slope[n], alpha=self.rates[n][0]) for n, t in psi.items()}

    def step_adversary(self, private: Tensors, gradient: Tensors) -> None:
        self.inner.step_adversary(private, gradient)
        turn = private.get("shift.turn")
        for name, t in _psi(private).items():
            step, multiplier = self.rates[name]
            moved = t if turn is None else t.clone()
            tensors.descend({name: moved}, gradient, step, decay=2 * multiplier, up=True)
            if turn is not None:
                t.copy_(torch.where(tensors.expand_trailing(turn == 0, t), moved, t))
        if turn is not None:
            turn.add_(1).remainder_(self.ascend_every)


@part("diagnosis")
@dataclass(frozen=True, kw_only=True)
class PrimalGap(Diagnosis):
    """FedRobust's convergence: the primal gap Φ(w) − f(w, ψ), ‖∇Φ(w)‖, Theorem 2's conditions on the step sizes and
    Theorem 4's bound. It takes about as long as 25 local steps."""

    rows = "train"
    ascents: int = 20
    """steps from ψ towards the worst shift, for Φ(w)"""

    def check(self, method: Method, setting: Setting) -> None:
        playing = [part for part in walk(method.objective) if isinstance(part, Shifted)]
        if not any(step for part in playing for step, _ in part.rates.values()):
            raise HardyError(
                f"diagnosis primal_gap measures the objective shifted with a step above 0; method {method.name!r} has "
                "none. Usual fix: method fedrobust, or leave the diagnosis out."
            )

    def diagnose(self, context: DiagnosisContext) -> dict[str, Any]:
        shifted = next(part for part in walk(context.objective) if isinstance(part, Shifted))

        def client(net: Net, private: Tensors, batch: Batch, key: Tensor) -> dict[str, Any]:
            def f(w: Tensors, psi: Tensors) -> Tensor:
                there = net.on({**net.trained, **w}, net.buffers)
                return shifted.loss(there, {**private, **psi}, batch, key) - shifted.price(psi)

            shared, psi = select(net.trained, context.shared), _psi(private)
            bound = wasserstein_bound(*shifted.lengths(psi), batch.x - shifted.centre)
            return {"bound": bound, **probe(f, shifted.ascend, shared, psi, ascents=self.ascents)}

        found = context.each(client)
        figures = conclude(found, clients=context.clients, rate=context.rate, steps=context.steps)
        return {**figures, "wasserstein_bound": found["bound"].mean().item()}


def _psi(private: Tensors) -> Tensors:
    """Λ and δ among a client's private tensors."""
    return select(private, ("shift.matrix", "shift.offset"))


def _waves(count: int, x: Tensor) -> Tensor:
    """The lowest frequencies of the images' cosine transform, orthonormal, [count, height, width]."""

    def waves(size: int, frequencies: list[int]) -> Tensor:
        at = (torch.arange(size, device=x.device, dtype=x.dtype) + 0.5) * (math.pi / size)
        return torch.stack([torch.cos(k * at) * math.sqrt((2 if k else 1) / size) for k in frequencies])

    height, width = x.shape[2:]
    grid = product(range(min(count, height)), range(min(count, width)))
    order = sorted(grid, key=lambda f: (sum(f), f))[:count]
    down, across = (waves(size, [f[axis] for f in order]) for axis, size in enumerate((height, width)))
    return torch.einsum("fh,fw->fhw", down, across)


primal_gap, shifted = PrimalGap, Shifted


@part("method")
def fedrobust(
    *,
    structure: Structure = "full",
    size: int = 4,
    centre: float = 0.0,
    step: float = 0.05,
    offset_step: float | None = None,
    multiplier: float = 2.0,
    offset_multiplier: float | None = None,
    ascend_every: int = 1,
    norm: Norm = batch(),
    objective: Objective = cross_entropy(),
    optimiser: Optimiser = sgd(),
) -> Method:
    """FedAvg whose clients each train against an affine shift of their own; the options are those of `shifted`."""
    return Method(
        name="fedrobust",
        norm=norm,
        objective=shifted(
            inner=objective,
            structure=structure,
            size=size,
            centre=centre,
            step=step,
            offset_step=offset_step,
            multiplier=multiplier,
            offset_multiplier=offset_multiplier,
            ascend_every=ascend_every,
        ),
        optimiser=optimiser,
    )


__all__ = ["fedrobust", "primal_gap", "shifted"]
