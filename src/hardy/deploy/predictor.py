"""A trained network whose width and robustness are chosen in place (Split-Mix, Algorithm 1, line 11, and Eq. 2)."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from hardy.core import tensors
from hardy.core.federation import Federation
from hardy.core.layers import calling
from hardy.core.method import Plan
from hardy.core.modes import set_mode
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.evaluation import serving
from hardy.models.count import macs, shares_kept


class Predictor(nn.Module):
    """predictor(x) gives the logits of images in [0, 1], [N, C, H, W]; `customise` changes width and robustness.

    An ordinary module of the bases that serve the width: parameters, state_dict, .to() and gradients are theirs. A base
    comes to the device when a width first needs it, and stays there, so that later changes copy nothing; `release`
    sends those that rest back to the host's memory. Training mode and eval mode are alike.
    """

    def __init__(
        self,
        plan: Plan,
        data: Federation,
        shared: Tensors,
        own: Tensors,
        *,
        rounds: int,
        client: int | None = None,
        width: float = 1.0,
        robustness: float | None = None,
        branch: str | None = None,
        order: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        images: Callable[[int], Tensor] | None = None,
    ) -> None:
        """`shared` are the server's tensors after so many rounds, [B, ...], and `own` the clients', [C, B, ...], or the
        one's, [1, B, ...].
        Without a robustness the statistics of `branch` serve, by default the norm's. `images` gives a client's training
        images, for a norm that recomputes statistics."""
        super().__init__()
        norm, names = plan.method.norm, serving.model_names(plan)
        own = {name: own[name] for name in names if name in own}
        recomputes = norm.inference_statistics == "recomputed"
        if (own or recomputes) and client is None:
            raise HardyError(
                f"norm {type(norm).__name__!r} gives every client a network of its own; choose one of the "
                f"{len(data.clients)} (client=0, or --client 0), or take run.network_for_new_client for somebody who "
                "has none."
            )
        if client is not None and not 0 <= client < len(data.clients):
            raise HardyError(f"client {client} is not there; it must be in [0, {len(data.clients) - 1}].")
        at = client or 0
        self.plan, self.shape, self.client, self.rounds = plan, data.shape, client, rounds
        self.branch, self.statistics = serving.chosen_branch(norm, branch), serving.call_statistics(norm)
        self._shared = tensors.apply(Tensor.cpu, {name: shared[name] for name in names if name in shared})
        self._own = tensors.apply(lambda t: (t if len(t) == 1 else t[at : at + 1]).cpu(), own)
        self._order, self._images = order, (lambda: [images(at)]) if images is not None else None
        self._known: dict[float, list[nn.Module]] = {}
        for known in plan.method.budget.widths:  # so that a change of width copies and builds nothing
            self._serve(known)
        self.bases = nn.ModuleList(module.to(device) for module in self._serve(width))
        self.width, self.robustness = width, robustness
        self.customise(robustness=robustness)

    def __repr__(self) -> str:
        level = "" if self.robustness is None else f", robustness {self.robustness:g}"
        whose = "" if self.client is None else f" of client {self.client}"
        return (
            f"Predictor{whose}: width {self.width:g}{level}, branch {self.branch!r}, {len(self.bases)} bases of "
            f"{type(self.plan.model).__name__}, {sum(p.numel() for p in self.parameters()):,} parameters"
        )

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.device, self.dtype)
        for base in self.bases:
            set_mode(base, training=False)
        with calling(branch=self.branch, statistics=self.statistics, key=None, robustness=self.robustness):
            answers: list[Tensor] = [base(x) for base in self.bases]
        return answers[0] if len(answers) == 1 else torch.stack(answers).mean(0)

    def customise(self, *, width: float | None = None, robustness: float | None = None) -> "Predictor":
        """Changes width, robustness (λ) or both; what is not given stays."""
        serving.refuse_robustness(robustness, self.plan.method.norm)
        if width is not None:
            device, dtype, bases = self.device, self.dtype, self._serve(width)
            for base in bases:
                held = next(base.parameters())
                if (held.device, held.dtype) != (device, dtype):
                    base.to(device, dtype)
            self.bases, self.width = nn.ModuleList(bases), width
        if robustness is not None:
            self.robustness = robustness
        return self

    def release(self) -> "Predictor":
        """Frees the device of the bases that the width does not need."""
        serving_now = set(self.bases)
        for base in {base for bases in self._known.values() for base in bases} - serving_now:
            base.cpu()
        return self

    def _serve(self, width: float) -> list[nn.Module]:
        """The bases of a width; a width of several bases shares them with every other."""
        if width not in self._known:
            served = serving.serve(
                self.plan,
                self._shared,
                self._own,
                rounds=self.rounds,
                width=width,
                order=self._order,
                images=self._images,
            ).bases(0)
            same = [] if self.plan.submodels else max(self._known.values(), key=len, default=[])[: len(served)]
            new = [serving.base_module(self.plan, held) for held in served[len(same) :]]
            self._known[width] = [*same, *new]
        return self._known[width]

    def costs(self) -> dict[str, Any]:
        """What this setting takes: bases, multiply-accumulates an image, parameters, and bytes of its tensors."""
        held = [self._held(base) for base in self.bases]
        sparse = self.plan.submodels is not None and self.plan.submodels.sparse
        kept = [shares_kept(self.plan.model, base) if sparse else None for base in held]
        return {
            "width": self.width,
            "robustness": self.robustness,
            "bases": len(held),
            "macs": sum(
                macs(self.plan.model, self.shape, tensors.shapes(base), own)
                for base, own in zip(held, kept, strict=True)
            ),
            "parameters": sum(int(p.count_nonzero()) if sparse else p.numel() for p in self.parameters()),
            "bytes": sum(map(tensors.count_bytes, held)),
        }

    def latency(self, images: int = 1, repeats: int = 20) -> float:
        """Seconds this setting takes for so many images here, the median of some calls."""
        x, seconds = torch.rand(images, *self.shape, device=self.device), []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            with torch.no_grad():
                self(x)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - began)
        return median(seconds[1:])

    def _held(self, base: nn.Module) -> Tensors:
        """The tensors of a base, without the constants of the model."""
        state = base.state_dict()
        return {name: state[name] for name in serving.model_names(self.plan)}
