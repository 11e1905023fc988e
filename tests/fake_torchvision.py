"""Lets timm be imported where torchvision is absent or broken.

timm imports torchvision for data loading, feature extraction and one norm layer. The tests build models alone, so empty
classes under torchvision's names are enough. A CPU build of torchvision beside this torch is not to be had.
"""

import sys
from types import ModuleType

import pytest

_MODULES = (
    "torchvision",
    "torchvision.datasets",
    "torchvision.models",
    "torchvision.models.feature_extraction",
    "torchvision.ops",
    "torchvision.ops.misc",
    "torchvision.transforms",
    "torchvision.transforms.functional",
)


class _Named(type):
    """Classes that have every attribute: its name."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Empty(ModuleType):
    """A module that has every name: a class that does nothing."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Named(name, (), {})
        setattr(self, name, made)
        return made


def without_torchvision():
    """From here on timm can be imported."""
    if "timm" not in sys.modules:
        for name in _MODULES:
            module = sys.modules.setdefault(name, _Empty(name))
            above, _, own = name.rpartition(".")
            if above:
                setattr(sys.modules[above], own, module)


def import_timm():
    """timm, or a skip with the reason."""
    without_torchvision()
    return pytest.importorskip("timm", reason="timm is not installed: pip install --no-deps timm")
