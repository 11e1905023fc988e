"""Takes in a module that was written without hardy's layers, and gives it back with its own ones."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from hardy.core.layers import AffineParameters, BatchNorm, Dropout, Statistics, calling
from hardy.errors import HardyError
from hardy.models.blocks import MakeNorm
from hardy.models.stacked import Conv2d, FusedSequential, Linear, MaxPool2d

_STOCK = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DIMENSIONS: dict[type[nn.Module], int] = {nn.BatchNorm1d: 2, nn.BatchNorm2d: 4, nn.BatchNorm3d: 5}
"""axes of what they normalise"""
_OURS: tuple[tuple[type[nn.Module], type[nn.Module]], ...] = (
    (Conv2d, nn.Conv2d),
    (Linear, nn.Linear),
    (MaxPool2d, nn.MaxPool2d),
    (FusedSequential, nn.Sequential),
)
"""layers of Hardy's own networks that have the attributes of torch's"""
_SIDES = (32, 28, 64, 224)
"""of the square images that a network of unknown input is tried on"""
_IMAGES = 4


def adopt(model: nn.Module, norm: MakeNorm = BatchNorm, *, shape: tuple[int, ...] | None = None) -> nn.Module:
    """A copy with norm(features) for every stock batch norm, hardy's Dropout for nn.Dropout, no in-place activations.

    A norm derived from a stock one is taken apart if it is a batch norm followed by its children, as timm's
    BatchNormAct2d; any other is refused. The copy with plain batch norms is compared with the model on random inputs of
    `shape`, such as (3, 32, 32), in evaluation and in training; without a shape, on one guessed from the first layer.
    """
    plain = _replaced(model, BatchNorm)
    tried = _refuse_changed(model, plain, shape)
    if norm is BatchNorm:
        return plain
    adopted = _replaced(model, norm)
    if all(isinstance(layer, BatchNorm) for layer in adopted.modules() if hasattr(layer, "adopted_from")):
        _refuse_changed(model, adopted, tried, modes=(False,))  # in training a norm may differ: that is its point
    return adopted


class NormThenLayers(nn.Module):
    """A batch norm and the layers that its class runs after it, under their own names."""

    def __init__(self, norm: nn.Module, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.batch_norm, self.order = norm, list(layers)
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        x = self.batch_norm(x)
        for name in self.order:
            x = self.get_submodule(name)(x)
        return x


def _replaced(model: nn.Module, norm: MakeNorm) -> nn.Module:
    """A copy with other layers. Each new one knows the old one (`adopted_from`), for `restore`."""
    try:
        holder = nn.ModuleDict({"model": deepcopy(model)})
    except (RuntimeError, TypeError) as error:
        raise HardyError(f"the model cannot be copied: {error} Hand over one that has not been run yet.") from error
    renewed: dict[nn.Module, nn.Module] = {}  # a layer used in two places stays one layer
    known: dict[str, bool] = {}
    for path, old in list(holder.named_modules(remove_duplicate=False))[1:]:
        if old not in renewed:
            renewed[old] = _renewed(old, norm, path.removeprefix("model."), known)
        holder.set_submodule(path, renewed[old])
    return holder["model"]


def _renewed(old: nn.Module, norm: MakeNorm, path: str, known: dict[str, bool]) -> nn.Module:
    """What stands in for a layer: itself, unless it keeps its behaviour in flags. `known` are the norms looked at."""
    new = old
    if type(old) in _STOCK:
        assert isinstance(old, _BatchNorm)
        new = _normalising(old, norm, path)
    elif isinstance(old, _BatchNorm):
        like = f"{type(old)} {old.eps} {list(old.children())}"
        if like not in known:
            known[like] = _is_norm_then_children(old)
        if not known[like]:
            raise HardyError(
                f"{type(old).__name__} at {path!r} cannot be adopted: it is derived from a stock batch norm and does "
                "more than run its children after it, which would be lost. Replace it by "
                f"nn.{_stock_name(old)} and a layer of its own for what it adds."
            )
        layers = dict(old.named_children())
        new = NormThenLayers(_normalising(old, norm, path), layers)
    elif type(old) is nn.Dropout:
        new = Dropout(old.p)
    elif getattr(old, "inplace", False):
        vars(old)["inplace"] = False
    if new is not old:
        vars(new)["adopted_from"] = (old,)  # in a tuple: it is no layer of the network
        new.train(old.training)
    return new


def _normalising(old: _BatchNorm, norm: MakeNorm, path: str) -> nn.Module:
    new = norm(old.num_features)
    held = next((t for t in (old.running_mean, old.weight) if t is not None), torch.empty(0))
    new = new.to(held.device, held.dtype)
    if isinstance(new, BatchNorm):
        _carry(old, new, path)
    return new


def _stock_name(layer: nn.Module) -> str:
    return next((stock.__name__ for stock in _STOCK if isinstance(layer, stock)), "BatchNorm2d")


def _is_norm_then_children(layer: _BatchNorm) -> bool:
    """Whether a layer does what a batch norm and then its children do, in evaluation and in training."""
    dimensions = next((n for stock, n in _DIMENSIONS.items() if isinstance(layer, stock)), None)
    if dimensions is None or layer.running_mean is None or hasattr(layer, "batch_norm"):
        return False
    held = layer.running_mean
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        x = (3 * torch.randn(8, layer.num_features, *[4] * (dimensions - 2)) + 1).to(held.device, held.dtype)
        tried = deepcopy(layer)
        for tensor in (tried.weight, tried.bias, tried.running_mean, tried.running_var):
            if tensor is not None:
                tensor.uniform_(0.5, 1.5)
        for training in (False, True):
            ours, theirs = deepcopy(tried).train(training), deepcopy(tried).train(training)
            torch.manual_seed(0)
            expected = F.batch_norm(
                x, ours.running_mean, ours.running_var, ours.weight, ours.bias, training, eps=ours.eps
            )
            for child in ours.children():
                expected = child(expected)
            torch.manual_seed(0)
            try:
                found = theirs(x.clone())
            except Exception:  # whatever it does, it is no batch norm
                return False
            if not _alike(expected, found):
                return False
    return True


def _carry(old: _BatchNorm, new: BatchNorm, path: str) -> None:
    """The affine, and the running statistics to every branch."""
    if old.running_mean is None or old.running_var is None:
        raise HardyError(
            f"{type(old).__name__} at {path!r} keeps no running statistics, so it infers by the batch. "
            "Set track_running_stats=True, or adopt with a norm without statistics (nn.GroupNorm)."
        )
    new.eps = old.eps
    with torch.no_grad():
        branches = [module for module in new.children() if isinstance(module, Statistics)]
        for holder in branches if new.dual_affine else [new]:
            if old.affine:
                holder.weight.copy_(old.weight).requires_grad_(old.weight.requires_grad)
                holder.bias.copy_(old.bias).requires_grad_(old.bias.requires_grad)
            else:
                _hold_affine(holder)
        for branch in branches:
            branch.mean.copy_(old.running_mean)
            branch.var.copy_(old.running_var)


def _hold_affine(holder: AffineParameters) -> None:
    """Makes scale and shift constants of the model: a norm without an affine trains none."""
    for name in ("weight", "bias"):
        value = getattr(holder, name).detach()
        delattr(holder, name)
        holder.register_buffer(name, value, persistent=False)


def _refuse_changed(
    model: nn.Module,
    adopted: nn.Module,
    shape: tuple[int, ...] | None,
    modes: tuple[bool, ...] = (False, True),
) -> tuple[int, ...]:
    """An error where the two answer differently, on the first shape that the model can run on, which is returned."""
    error: Exception | str = "its first layer tells no shape"
    for tried in [shape] if shape else _guessed(model):
        try:
            before = [_answer(model, tried, training=training) for training in modes]
        except HardyError:
            raise
        except Exception as raised:  # another shape than its own makes a model raise anything
            error = raised
            continue
        for training, wanted in zip(modes, before, strict=True):
            if wanted is not None and not _alike(wanted, _answer(adopted, tried, training=training)):
                raise HardyError(
                    f"the adopted model answers differently in {'training' if training else 'evaluation'} on inputs of "
                    f"shape {tuple(tried)}, though only its batch norms and dropout were replaced. Does its forward "
                    "look at their type, attributes or mode? Write the model with hardy.models.BatchNorm and "
                    "hardy.models.Dropout instead."
                )
        return tuple(tried)
    said = str(error).partition("\n")[0].rstrip(".")
    if shape:
        raise HardyError(f"the model cannot run on inputs of shape {tuple(shape)}: {said}.")
    raise HardyError(
        f"the model could not be tried on inputs of a guessed shape ({said}), so nobody knows whether adopting changes "
        "it. Say which shape it takes: adopt(model, norm, shape=(3, 32, 32))."
    )


def _guessed(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """Input shapes that would fit the first layer."""
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear | _BatchNorm)), None)
    if isinstance(first, nn.Conv2d):
        yield from ((first.in_channels, side, side) for side in _SIDES)
    elif isinstance(first, nn.Linear):
        yield (first.in_features,)
    elif first is not None:
        yield from ((first.num_features,), (first.num_features, 8, 8))


def _answer(model: nn.Module, shape: tuple[int, ...], *, training: bool) -> Tensor | None:
    """What a copy of the model answers to random inputs, the same in every call. In training, layers of dropout drop
    nothing; None: it needs a process group."""
    if training and any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules()):
        return None
    model = deepcopy(model).train(training)
    held = next((tensor for tensor in model.parameters()), torch.empty(0))
    if held.is_meta:
        raise HardyError("the model holds no values (device meta), so it cannot be compared. Build it on the CPU.")
    for layer in model.modules():
        if type(layer) in (nn.Dropout, Dropout):
            vars(layer)["p"] = 0.0
    statistics, key = ("batch", torch.tensor(0, device=held.device)) if training else ("running", None)
    with torch.random.fork_rng(), torch.no_grad(), calling(branch="clean", statistics=statistics, key=key):  # type: ignore[arg-type]
        torch.manual_seed(0)
        out = model(torch.rand(_IMAGES, *shape).to(held.device, held.dtype))
    if not isinstance(out, Tensor):
        raise HardyError(
            f"the model answers with {type(out).__name__}; it must be one tensor of logits, [images, classes]. Wrap it "
            "in a module that returns the logits."
        )
    return out


def _alike(wanted: Tensor, found: Tensor | None) -> bool:
    if found is None or found.shape != wanted.shape:
        return False
    limit = torch.finfo(wanted.dtype).eps ** 0.5 * wanted.abs().max()
    return bool(((found - wanted).abs() <= limit).all())


def restore(model: nn.Module, forward: Callable[[nn.Module], object], *, branch: str = "clean") -> nn.Module:
    """The inverse of `adopt`: a copy with the layers that the model had, and the values that it has now.

    Norms get the statistics of a branch. A network that was written with hardy's layers gets torch's own ones;
    `forward` runs the copy once on images, which tells how many axes its norms see.
    """
    holder = nn.ModuleDict({"model": deepcopy(model).cpu().eval()})
    axes = _axes(holder["model"], forward)
    given: dict[nn.Module, nn.Module] = {}
    for path, layer in list(holder.named_modules(remove_duplicate=False))[1:]:
        if layer not in given:
            given[layer] = _given_back(layer, branch, axes.get(layer, 4))
        above, _, name = path.rpartition(".")
        if name in _children(holder, above):  # else the layer around it has gone
            holder.set_submodule(path, given[layer])
    return holder["model"].eval()


def _children(model: nn.Module, path: str) -> set[str]:
    try:
        return {name for name, _ in model.get_submodule(path).named_children()}
    except AttributeError:
        return set()


def _axes(model: nn.Module, forward: Callable[[nn.Module], object]) -> dict[nn.Module, int]:
    """The number of axes of what each norm is given."""
    found: dict[nn.Module, int] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda layer, inputs: found.update({layer: inputs[0].dim()}))
        for layer in model.modules()
        if isinstance(layer, BatchNorm)
    ]
    try:
        forward(model)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _given_back(layer: nn.Module, branch: str, axes: int) -> nn.Module:
    old: Any
    (old,) = vars(layer).get("adopted_from", (None,))
    if isinstance(layer, BatchNorm) and type(layer) is not BatchNorm:
        raise HardyError(
            f"{type(layer).__name__} is more than a batch norm, so the network has no form in torch's own layers. Take "
            "run.customise()."
        )
    if isinstance(layer, NormThenLayers) and isinstance(layer.batch_norm, BatchNorm):
        _write(layer.batch_norm, branch, old)
        return cast(nn.Module, old)
    if isinstance(layer, BatchNorm):
        stock = {5: nn.BatchNorm3d, 4: nn.BatchNorm2d}.get(axes, nn.BatchNorm1d)
        held = layer.branch(branch)[0].mean
        old = old or stock(len(held), eps=layer.eps, momentum=layer.branch(branch)[0].momentum, dtype=held.dtype)
        _write(layer, branch, old)
        return cast(nn.Module, old)
    if type(layer) is Dropout:
        return old or nn.Dropout(layer.p)
    for ours, theirs in _OURS:
        if type(layer) is ours:
            layer.__class__ = theirs  # the same attributes, torch's own forward
    return layer


@torch.no_grad()
def _write(layer: BatchNorm, branch: str, old: _BatchNorm) -> None:
    """A branch's statistics and affine, into a stock norm."""
    kept, affine = layer.branch(branch)
    old.to(kept.mean.device, kept.mean.dtype)
    assert old.running_mean is not None and old.running_var is not None
    old.running_mean.copy_(kept.mean)
    old.running_var.copy_(kept.var)
    if old.affine:
        old.weight.copy_(affine.weight)
        old.bias.copy_(affine.bias)
