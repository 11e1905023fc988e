"""Data from Python: arrays, tensors or torch data sets become what `fit` takes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from hardy.core.federation import Federation
from hardy.data.dataset import Dataset
from hardy.data.own_data import Channels, Raw, Reading, ValueRange, own_dataset
from hardy.errors import HardyError

OwnData = Federation | Dataset | Sequence[Any] | Mapping[str, Any] | TorchDataset[Any]
"""what `as_data` takes"""
_WANTED = "(x, y), (x, y, x_test, y_test), a torch Dataset or two, or a list or dict of them, one for each client"


def arrays(
    x_train: Any,
    y_train: Any = None,
    x_test: Any = None,
    y_test: Any = None,
    *,
    classes: Sequence[str] | int | None = None,
    value_range: ValueRange = None,
    channels: Channels | None = None,
    holdout: float = 0.2,
    name: str = "arrays",
) -> Dataset:
    """Your own arrays or tensors: images of any type and number of channels, or feature vectors.

    uint8 and uint16 are scaled by their greatest value, floats are in [0, 1]; other images need a `value_range`, the
    values of black and white. Vectors come as they are; with a range they become [0, 1]. Labels are whole numbers or
    words. Without test rows a share `holdout` of each class is kept for testing. A mapping gives x_train, y_train and
    perhaps x_test, y_test for each domain.
    """
    how = Reading(classes=classes, value_range=value_range, channels=channels, holdout=holdout)
    given = x_train if isinstance(x_train, Mapping) else {name: (x_train, y_train, x_test, y_test)}
    return own_dataset(name, {domain: _raw(f"{name}: {domain}", own) for domain, own in given.items()}, how)


def as_data(
    data: OwnData,
    *,
    value_range: ValueRange = None,
    classes: Sequence[str] | int | None = None,
    channels: Channels | None = None,
    holdout: float = 0.2,
    name: str = "data",
) -> Federation | Dataset:
    """What `fit` works on, out of whatever a user has.

    One tuple (x, y) or (x, y, x_test, y_test), one torch Dataset or a tuple of two (train, test) is a pool of rows,
    dealt to clients as the experiment says. A list or a dict of them is a federation as it is: an entry is a client.
    """
    if isinstance(data, Federation | Dataset):
        if value_range is not None:
            raise HardyError("data.range has no effect on data that are built already. Leave it out.")
        return data
    how = Reading(classes=classes, value_range=value_range, channels=channels, holdout=holdout)
    if isinstance(data, tuple | TorchDataset):
        return own_dataset(name, {name: _raw(name, data)}, how)
    if isinstance(data, list):
        data = {f"client {number}": own for number, own in enumerate(data)}
    if not isinstance(data, Mapping):
        raise HardyError(f"data is {type(data).__name__}; it must be {_WANTED}.")
    given = {str(client): _raw(f"{name}: {client}", own) for client, own in data.items()}
    return own_dataset(name, given, how, natural=True)


def _raw(where: str, given: Any) -> Raw:
    if isinstance(given, TorchDataset):
        given = (given,)
    if not isinstance(given, tuple | list):
        raise HardyError(f"{where} is {type(given).__name__}; it must be {_WANTED}.")
    if 1 <= len(given) <= 2 and all(isinstance(part, TorchDataset) for part in given):
        return Raw(*(array for part in given for array in _collected(where, part)))
    if len(given) not in (2, 4) or any(part is None for part in given[:2]):
        missing = "no labels" if len(given) in (2, 4) else f"{len(given)} arrays"
        raise HardyError(f"{where} has {missing}; give x_train, y_train, or x_train, y_train, x_test, y_test.")
    if len(given) == 4 and (given[2] is None) != (given[3] is None):
        raise HardyError(f"{where} has one of x_test and y_test; give both or none.")
    return Raw(*given)


def _collected(where: str, rows: TorchDataset[Any]) -> tuple[Any, Any]:
    """All rows of a torch data set, each (input, label): tensors, arrays or numbers, or Pillow pictures."""
    loader = DataLoader(rows, batch_size=256, collate_fn=list)
    pairs = [pair for batch in loader for pair in batch]
    for number, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise HardyError(f"{where}: row {number} of the torch data set is no pair (input, label); make it one.")
    if not pairs:
        raise HardyError(f"{where}: the torch data set is empty; give at least one row.")
    inputs = [x if isinstance(x, torch.Tensor) else np.asarray(x) for x, _ in pairs]
    shapes = {tuple(x.shape) for x in inputs}
    if len(shapes) > 1:
        raise HardyError(f"{where}: rows of the torch data set have the shapes {sorted(shapes)[:3]}; bring all to one.")
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    x = torch.stack(tensors) if len(tensors) == len(inputs) else np.stack([np.asarray(x) for x in inputs])
    return x, np.asarray([label.item() if isinstance(label, torch.Tensor) else label for _, label in pairs])
