"""One paper, one file: its new piece and a function that returns a Method."""

from hardy.papers.fedavg import centralised, fedavg, fedprox, local_only
from hardy.papers.fedbn import fedbn
from hardy.papers.fednova import fednova
from hardy.papers.scaffold import scaffold

__all__ = ["centralised", "fedavg", "fedbn", "fednova", "fedprox", "local_only", "scaffold"]
