"""What a data source gives: labelled images by domain."""

from dataclasses import dataclass

from hardy.core.federation import Labels, Pixels


@dataclass(frozen=True, kw_only=True)
class Domain:
    """One domain's training and test images. `owners` names the natural client of each training row (LEAF)."""

    name: str
    x_train: Pixels
    y_train: Labels
    x_test: Pixels
    y_test: Labels
    owners_train: Labels | None = None
    owners_test: Labels | None = None


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Domains of one image shape and one list of classes."""

    name: str
    classes: tuple[str, ...]
    domains: tuple[Domain, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channel, height, width)"""
        height, width, channel = self.domains[0].x_train.shape[1:]
        return channel, height, width
