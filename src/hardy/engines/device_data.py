"""A federation's images on a device, and the arithmetic that works on them."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hardy.core.box import inputs
from hardy.core.federation import Federation, Rows
from hardy.data.augmentation import Augmentation

Precision = Literal["float32", "tf32", "float64", "bfloat16"]


class DeviceData:
    """A federation's images on a device, in one tensor for all clients: no loader, no copies."""

    def __init__(
        self,
        data: Federation,
        device: torch.device,
        precision: Precision = "tf32",
        augmentation: Augmentation | None = None,
    ) -> None:
        self.federation, self.device, self.augmentation = data, device, augmentation
        self.dtype = torch.float64 if precision == "float64" else torch.float32
        self.mixed = precision == "bfloat16"
        self.tf32 = precision in ("tf32", "bfloat16")
        self.x = {
            "train": torch.from_numpy(data.x_train).to(device),
            "test": torch.from_numpy(data.x_test).to(device),
        }
        self.y = {
            "train": torch.from_numpy(data.y_train).to(device),
            "test": torch.from_numpy(data.y_test).to(device),
        }

        self.places: dict[str, Tensor] = {}
        """part -> where each row lies, where only some are held; one that is not has a place beyond the end"""

    def only(self, *, train: Rows, test: Rows) -> "DeviceData":
        """The same with these rows alone."""
        part = copy(self)
        part.x, part.places = {}, {}
        for name, rows in (("train", train), ("test", test)):
            chosen, places = torch.from_numpy(rows), np.full(len(self.x[name]), len(rows))
            places[rows] = np.arange(len(rows))
            part.x[name] = self.x[name][chosen.to(self.device)]
            part.places[name] = torch.from_numpy(places).to(self.device)
        return part

    def images(self, part: str, rows: Tensor) -> Tensor:
        """Images in [0, 1], or feature vectors, as networks take them."""
        held = self.x[part][self.places[part][rows] if self.places else rows]
        return held.to(self.dtype).div_(255.0) if held.dtype is torch.uint8 else held.to(self.dtype)

    @contextmanager
    def arithmetic(self, *, training: bool) -> Iterator[None]:
        """Products of layers inside are TF32 where the precision says so, and in training steps bfloat16 with precision
        bfloat16; weights, statistics, gradients and losses stay float32. Attacks inside keep inputs in their box, if
        they have one. The process is left as it was."""
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        before = matmul.allow_tf32, cudnn.allow_tf32
        matmul.allow_tf32 = cudnn.allow_tf32 = self.tf32
        mixed = self.mixed and training
        try:
            with (
                inputs(bounded=self.federation.bounded),
                torch.autocast(self.device.type, torch.bfloat16, enabled=mixed, cache_enabled=False),
            ):
                yield
        finally:
            matmul.allow_tf32, cudnn.allow_tf32 = before
