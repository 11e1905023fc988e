"""One paper, one file: its new piece and a function that returns a Method."""

from hardy.papers.afl import afl
from hardy.papers.fat import fatavg, fatavg_dbn, fatbn, fatmeta, fatprox, fatscaffold
from hardy.papers.fed_soft_better import fed_soft_better
from hardy.papers.fedavg import centralised, fedavg, fedprox, local_only
from hardy.papers.fedbn import fedbn
from hardy.papers.fednova import fednova
from hardy.papers.per_fedavg import per_fedavg
from hardy.papers.scaffold import scaffold

__all__ = [
    "afl",
    "centralised",
    "fatavg",
    "fatavg_dbn",
    "fatbn",
    "fatmeta",
    "fatprox",
    "fatscaffold",
    "fed_soft_better",
    "fedavg",
    "fedbn",
    "fednova",
    "fedprox",
    "local_only",
    "per_fedavg",
    "scaffold",
]
