"""Engines: the same round, run one slot after another or many at once."""

from hardy.engines.auto import ENGINES, EngineChoice, choose
from hardy.engines.base import Engine
from hardy.engines.device_data import DeviceData
from hardy.engines.sequential import Sequential
from hardy.engines.timing import seconds_per_slot
from hardy.engines.vectorised import Vectorised

__all__ = [
    "ENGINES",
    "DeviceData",
    "Engine",
    "EngineChoice",
    "Sequential",
    "Vectorised",
    "choose",
    "seconds_per_slot",
]
