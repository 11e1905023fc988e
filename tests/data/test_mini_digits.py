"""The embedded data set: what its users may rely on."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hardy.data import dataset
from hardy.data.sources import load_dataset
from hardy.errors import HardyError

FILE = Path(dataset.__file__).with_name("mini_digits.npz")
GREY, COLOUR = ("pen", "mail"), ("street", "print", "blend")


@pytest.fixture(scope="module")
def arrays() -> Mapping[str, NDArray[np.uint8]]:
    with np.load(FILE) as file:
        return dict(file)


def test_is_small_and_has_its_licence() -> None:
    assert FILE.stat().st_size <= 1.5e6
    assert "CC BY 4.0" in FILE.with_suffix(".LICENSE.txt").read_text()


def test_holds_five_domains_and_nothing_else(arrays: Mapping[str, NDArray[np.uint8]]) -> None:
    assert set(arrays) == {f"{d}_{a}_{s}" for d in GREY + COLOUR for a in "xy" for s in ("train", "test")}


@pytest.mark.parametrize("domain", GREY + COLOUR)
@pytest.mark.parametrize(("split", "per_class"), [("train", 60), ("test", 20)])
def test_shapes_and_balance(arrays: Mapping[str, NDArray[np.uint8]], domain: str, split: str, per_class: int) -> None:
    x, y = arrays[f"{domain}_x_{split}"], arrays[f"{domain}_y_{split}"]
    assert x.dtype == np.uint8
    assert x.shape == (10 * per_class, 28, 28) + ((3,) if domain in COLOUR else ())
    assert np.bincount(y).tolist() == [per_class] * 10
    assert len(set(y[:20].tolist())) > 5  # shuffled: the first rows are a fair sample


def test_no_image_occurs_twice(arrays: Mapping[str, NDArray[np.uint8]]) -> None:
    images = [image.tobytes() for name, x in arrays.items() if "_x_" in name for image in x]
    assert len(images) == len(set(images)) == 5 * 800


def test_domains_differ_in_brightness_and_colour(arrays: Mapping[str, NDArray[np.uint8]]) -> None:
    mean = {d: arrays[f"{d}_x_train"].mean() for d in GREY + COLOUR}
    assert mean["pen"] < 0.6 * mean["mail"] < 0.6 * min(mean[d] for d in COLOUR)
    spread = {d: np.ptp(arrays[f"{d}_x_train"], axis=-1).mean() for d in COLOUR}
    assert spread["print"] > 1.5 * spread["street"]  # print is vivid, streets are grey


def test_domains_can_be_chosen() -> None:
    assert [domain.name for domain in load_dataset("mini_digits", domains=["mail"]).domains] == ["mail"]
    with pytest.raises(HardyError, match="Did you mean 'mail'"):
        load_dataset("mini_digits", domains=["mial"])
