"""How devices differ: the same scene, taken by every client with a device of its own.

A key is a device: a shift draws its device from the key and treats all images of that device alike. Shifts are pure and
run under vmap. Images of a shifted federation are clipped to [0, 1]; bytes are rounded to the nearest of 256 levels, as
a camera stores them.
"""

import math
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from hardy.core import random
from hardy.core.federation import Federation, Labels, Pixels, Rows
from hardy.errors import HardyError
from hardy.registry import kind, part

_MAX_FULL = 1 << 14
"""values of the largest image a full matrix is drawn for: 1 GiB in float32"""
_CHUNK = 1024
"""images shifted in one call"""


@kind("shift")
@dataclass(frozen=True, kw_only=True)
class Shift:
    """The part that says how a device changes what it sees."""

    strength: float = 1.0
    """how far devices lie apart; at 0 all see the same"""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is float and not 0 <= value < math.inf:
                raise HardyError(f"{field.name} of a shift is {value}; it must be 0 or more, and finite.")

    def apply(self, x: Tensor, key: Tensor) -> Tensor:
        """Images [N, C, H, W] in [0, 1] as the device of this key takes them."""
        raise NotImplementedError


@part("shift")
@dataclass(frozen=True, kw_only=True)
class GaussianAffine(Shift):
    """x + xM + b on flat images in [-1, 1]: M ~ N(0, s²/d), b ~ N(0, s²), as FedRobust's authors shift theirs."""

    strength: float = 0.01
    """s: the entries of M have deviation s/√d, those of b s"""

    def apply(self, x: Tensor, key: Tensor) -> Tensor:
        size = x[0].numel()
        if size > _MAX_FULL:
            raise HardyError(
                f"gaussian_affine mixes all {size} values of an image; the limit is {_MAX_FULL}. "
                "Take smaller images, or the shift camera."
            )
        centred = 2 * x.flatten(1) - 1
        matrix = random.normal(random.fold(key, 1), (size, size), x.dtype) * (self.strength / math.sqrt(size))
        offset = random.normal(random.fold(key, 2), (size,), x.dtype) * self.strength
        moved = centred + centred @ matrix + offset
        return ((moved + 1) / 2).clamp(0.0, 1.0).view(x.shape)


@part("shift")
@dataclass(frozen=True, kw_only=True)
class Camera(Shift):
    """What cameras do, in the order of the light's way: blur, colour cast, contrast, brightness, gamma.

    Each is drawn uniformly between its extremes, times the strength; 0 leaves one out.
    """

    blur: float = 1.0
    """largest deviation of the Gaussian, in pixels"""
    colour: float = 0.25
    """each channel is multiplied by e^±colour at most"""
    contrast: float = 0.5
    """distance from mid-grey is multiplied by e^±contrast at most"""
    brightness: float = 0.2
    """added at most, in [0, 1]"""
    gamma: float = 0.5
    """the exponent is e^±gamma at most"""

    def apply(self, x: Tensor, key: Tensor) -> Tensor:
        def drawn(word: str, largest: float, count: int = 1) -> Tensor:
            """Uniform in ± largest, [count, 1, 1]."""
            draw = random.uniform(random.fold(key, word), (count, 1, 1), x.dtype)
            return (2 * draw - 1) * (self.strength * largest)

        deviation = drawn("blur", self.blur).abs()
        rows, columns = (_blur(size, deviation.view(()), x) for size in x.shape[2:])
        seen = torch.einsum("ih,nchw,jw->ncij", rows, x, columns)
        seen = seen * drawn("colour", self.colour, x.shape[1]).exp()
        seen = (seen - 0.5) * drawn("contrast", self.contrast).exp() + 0.5
        seen = seen + drawn("brightness", self.brightness)
        return seen.clamp(0.0, 1.0) ** drawn("gamma", self.gamma).exp()


def _blur(size: int, deviation: Tensor, x: Tensor) -> Tensor:
    """The matrix [size, size] that blurs a line; at the edges the weights inside the image are scaled up."""
    at = torch.arange(size, dtype=x.dtype, device=x.device)
    return (-((at[:, None] - at) ** 2) / (2 * deviation**2 + 1e-12)).softmax(-1)


def device(seed: int, client: int) -> Tensor:
    """The key of a client's device."""
    return random.fold(torch.tensor(seed), "device", client)


def seen(x: Pixels, shift: Shift, key: Tensor) -> Pixels:
    """Images [image, channel, height, width] as the device of this key takes them; bytes stay bytes."""
    whole = 255 if x.dtype == np.uint8 else 1
    chunks = [shift.apply(torch.from_numpy(x[at : at + _CHUNK]) / whole, key) for at in range(0, len(x), _CHUNK)]
    if not chunks:
        return x
    taken = torch.cat(chunks)
    pixels: Pixels = (taken * 255).round().byte().numpy() if whole == 255 else taken.numpy()
    return pixels


def with_shift(federation: Federation, shift: Shift, *, seed: int, test: bool = False) -> Federation:
    """Every client's training and validation rows as its own device takes them; its test rows too, where asked.

    Rows are laid out anew, client by client, so that clients who share a row see it each in its own way. Those of
    domains that are held out, whom no device takes, come last.
    """
    if len(federation.shape) == 1:
        raise HardyError(
            f"data.shift changes images, but the data are vectors of {federation.shape[0]} features. Leave it out."
        )

    clients, everybody = federation.clients, (*federation.clients, *federation.held_out)

    def taken(x: Pixels, y: Labels, held: list[Rows]) -> tuple[Pixels, Labels, list[Rows]]:
        images: Pixels = np.concatenate(
            [
                seen(x[rows], shift, device(seed, number)) if number < len(clients) else x[rows]
                for number, rows in enumerate(held)
            ]
        )
        ends = np.cumsum([len(rows) for rows in held])
        return images, y[np.concatenate(held)], np.split(np.arange(ends[-1]), ends[:-1])

    x_test, y_test = federation.x_test, federation.y_test
    held = [np.concatenate([client.train, client.validation]) for client in everybody]
    x_train, y_train, own = taken(federation.x_train, federation.y_train, held)
    tests = [client.test for client in everybody]
    if test:
        x_test, y_test, tests = taken(x_test, y_test, tests)
    moved = tuple(
        replace(client, train=rows[: len(client.train)], validation=rows[len(client.train) :], test=tested)
        for client, rows, tested in zip(everybody, own, tests, strict=True)
    )
    own_devices, held_out = moved[: len(clients)], moved[len(clients) :]
    return replace(
        federation,
        x_train=x_train,
        y_train=y_train,
        x_test=x_test,
        y_test=y_test,
        clients=own_devices,
        held_out=held_out,
    )


camera, gaussian_affine = Camera, GaussianAffine
__all__ = ["Shift", "camera", "device", "gaussian_affine", "seen", "with_shift"]
