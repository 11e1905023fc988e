"""What FLRA's theory lets a user read off a run, and what it advises.

Reisizadeh et al., Robust Federated Learning: The Case of Affine Distribution Shifts, NeurIPS 2020, §4.

f = mean over n clients of f^i(w, ψ^i) · Φ(w) = max_ψ f(w, ψ) · η₁ descent rate, η₂ ascent step, τ local steps
L₁, L₁₂ Lipschitz constants of ∇_w f in w and in ψ · L₂₁, L₂ those of ∇_ψ f · µ₂ PL constant of −f(w, ·)
Theorem 2: ‖∇Φ(w)‖ becomes small if η₂ ≤ 1/L₂, η₁/η₂ ≤ µ₂²n²/8L₁₂², 32η₁²(τ−1)²L₁² ≤ 1 and η₁(L̂ + 40L̃(τ−1)²) ≤ 1 with
L̂ = 3/2 (L₁ + L₁₂L₂₁/2nµ₂) + L₁/2 + L₂₁²/L₂ and L̃ = 3/2 η₁L₁² + 1/2 η₂L₂₁².
Theorem 3: the smaller the spectral norms of the weights, the better the robust error generalises.
Theorem 4: the Wasserstein cost of an affine shift is at most max{ξ, 1}(‖Λ − I‖²_F + ‖δ‖²), ξ the largest eigenvalue of
E[xxᵀ].

Every constant is measured at one point and in few directions, so the L are too small and µ₂ is too large: a broken
condition is truly broken, one that holds proves nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, grad_and_value

from hardy.core import random
from hardy.core.net import Net
from hardy.core.protocols import Batch, Objective, StepResult, Wrapper
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.parts.objectives import cross_entropy
from hardy.registry import part

_NEAR = 0.01
"""how far from w smoothness is measured, in ‖w‖"""


def probe(
    f: Callable[[Tensors, Tensors], Tensor],
    climb: Callable[[Tensors, Tensors], Tensors],
    w: Tensors,
    psi: Tensors,
    *,
    ascents: int,
) -> dict[str, Any]:
    """One client's part of a diagnosis: Φ(w) by `ascents` steps of climb(ψ, ∇_ψ f), its gradient, and smoothness."""
    both = grad_and_value(f, (0, 1))
    (of_w, of_psi), value = both(w, psi)
    away = _NEAR * _norm(w)
    at_w, _ = both({n: t - away / _norm(of_w) * of_w[n] for n, t in w.items()}, psi)
    climbed = climb(psi, of_psi)
    at_psi, _ = both(w, climbed)
    moved = _norm(_minus(climbed, psi))

    best, top, current = value, psi, climbed
    for _ in range(ascents):
        slope, reached = grad_and_value(f, 1)(w, current)
        top = {n: torch.where(reached > best, t, top[n]) for n, t in current.items()}
        best, current = best.maximum(reached), climb(current, slope)
    return {
        "gap": best - value,
        "gradient": grad(f)(w, top),  # ∇Φ(w) = ∇_w f(w, ψ*)
        "slope": _norm(of_psi) ** 2,
        "eta2": moved / _norm(of_psi),
        "L1": _norm(_minus(at_w[0], of_w)) / away,
        "L21": _norm(_minus(at_w[1], of_psi)) / away,
        "L12": _norm(_minus(at_psi[0], of_w)) / moved,
        "L2": _norm(_minus(at_psi[1], of_psi)) / moved,
    }


def conclude(found: dict[str, Any], *, clients: int, rate: float, steps: int) -> dict[str, Any]:
    """The figures of a round out of the clients' stacked probes; `rate` is η₁, `steps` is τ."""
    largest = {name: found[name].max().item() for name in ("L1", "L2", "L12", "L21")}
    gap, eta2 = found["gap"].mean().item(), found["eta2"].mean().item()
    of_a_client = found["slope"].mean().item() / (2 * gap) if gap > 0 else float("inf")  # PL constant of f^i, nµ₂
    return {
        "primal_gap": gap,
        "phi_gradient": _norm({n: g.mean(0) for n, g in found["gradient"].items()}).item(),
        "smoothness": {**largest, "mu2": of_a_client / clients, "eta1": rate, "eta2": eta2},
        "broken_conditions": broken(**largest, pl=of_a_client, eta1=rate, eta2=eta2, steps=steps),
    }


def broken(
    *, L1: float, L2: float, L12: float, L21: float, pl: float, eta1: float, eta2: float, steps: int
) -> list[str]:
    """Theorem 2's conditions on the step sizes that do not hold, each with the remedy; pl is nµ₂, steps is τ."""
    tilde = 1.5 * eta1 * L1**2 + 0.5 * eta2 * L21**2
    hat = 1.5 * (L1 + L12 * L21 / (2 * pl)) + 0.5 * L1 + L21**2 / L2
    drift = steps - 1
    conditions = (
        ("η₂ ≤ 1/L₂", eta2 * L2, "lower the ascent step or the multiplier"),
        ("η₁/η₂ ≤ µ₂²n²/8L₁₂²", eta1 / eta2 * 8 * (L12 / pl) ** 2, "lower training.rate or raise the ascent step"),
        ("32η₁²(τ−1)²L₁² ≤ 1", 32 * (eta1 * drift * L1) ** 2, "lower training.rate or the local steps"),
        ("η₁(L̂ + 40L̃(τ−1)²) ≤ 1", eta1 * (hat + 40 * tilde * drift**2), "lower training.rate or the local steps"),
    )
    return [f"{text}: broken {ratio:.3g} times over; {remedy}" for text, ratio, remedy in conditions if ratio > 1]


def wasserstein_bound(matrix: Tensor, offset: Tensor, x: Tensor) -> Tensor:
    """Theorem 4's bound, given ‖Λ − I‖²_F, ‖δ‖² and images; E[xxᵀ] is that of the images."""
    moment = spectral_norm(x.flatten(1), iterations=20).square() / len(x)
    return moment.clamp_min(1.0) * (matrix + offset)


def spectral_norm(matrix: Tensor, *, iterations: int) -> Tensor:
    """The largest singular value by power iteration, always from the same start; differentiable in the matrix."""
    fixed = matrix.detach()
    right = random.normal(torch.zeros((), dtype=torch.int64, device=matrix.device), fixed.shape[1:], matrix.dtype)
    left = fixed @ right
    for _ in range(iterations):
        right = _unit(fixed.T @ _unit(left))
        left = fixed @ right
    return _unit(left) @ matrix @ right


@part("objective")
@dataclass(frozen=True, kw_only=True)
class Lipschitz(Wrapper):
    """Adds strength/2 · Σ σ(W)² over the weights, which keeps the network's Lipschitz constant Π σ(W) small.

    A convolution counts as the matrix [output, input · kernel] of its kernel.
    """

    inner: Objective = cross_entropy()
    strength: float = 1e-3
    """weight of the penalty"""
    iterations: int = 5
    """of the power method, in every step"""

    def __post_init__(self) -> None:
        if not 0 <= self.strength < float("inf") or self.iterations < 1:
            raise HardyError(
                f"lipschitz takes a strength of 0 or more and 1 iteration or more; it got {self.strength} and "
                f"{self.iterations}."
            )

    def gradient(
        self, outer: Objective, net: Net, private: Tensors, batch: Batch, key: Tensor, received: Tensors
    ) -> StepResult:
        found = self.inner.gradient(outer, net, private, batch, key, received)
        matrices = {n: w for n, w in net.trained.items() if w.dim() > 1}
        if not matrices or not self.strength:
            return found

        def penalty(weights: Tensors) -> Tensor:
            norms = [spectral_norm(w.flatten(1), iterations=self.iterations) for w in weights.values()]
            return self.strength / 2 * torch.stack(norms).square().sum()

        pulled = {n: found.gradient[n] + g for n, g in grad(penalty)(matrices).items()}
        return found._replace(gradient={**found.gradient, **pulled})


def _unit(vector: Tensor) -> Tensor:
    return vector / vector.square().sum().sqrt().clamp_min(1e-12)


def _norm(tensors: Tensors) -> Tensor:
    return torch.stack([t.square().sum() for t in tensors.values()]).sum().sqrt().clamp_min(1e-12)


def _minus(first: Tensors, second: Tensors) -> Tensors:
    return {n: t - second[n] for n, t in first.items()}


lipschitz = Lipschitz
__all__ = ["broken", "conclude", "lipschitz", "probe", "spectral_norm", "wasserstein_bound"]
