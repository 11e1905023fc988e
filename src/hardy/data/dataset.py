"""What a data source gives: labelled images or feature vectors by domain."""

from dataclasses import dataclass

from hardy.core.federation import Labels, Pixels


@dataclass(frozen=True, kw_only=True)
class Domain:
    """One domain's training and test inputs, channels last. `owners` names the natural client of each row (LEAF)."""

    name: str
    x_train: Pixels
    y_train: Labels
    x_test: Pixels
    y_test: Labels
    owners_train: Labels | None = None
    owners_test: Labels | None = None


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Domains of one input shape and one list of classes."""

    name: str
    classes: tuple[str, ...]
    domains: tuple[Domain, ...]
    bounded: bool = True
    """whether inputs are in [0, 1]: all images are, feature vectors only where their range was given"""
    natural: bool = False
    """its domains are clients as they are: the split is natural unless the experiment names another"""

    @property
    def shape(self) -> tuple[int, ...]:
        """(channel, height, width), or (features,)"""
        *grid, last = self.domains[0].x_train.shape[1:]
        return last, *grid
