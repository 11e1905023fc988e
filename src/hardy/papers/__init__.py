"""One paper, one file: its new piece and a function that returns a Method."""

from hardy.papers.afl import afl
from hardy.papers.calfat import calfat
from hardy.papers.dbfat import dbfat
from hardy.papers.depthfl import depthfl
from hardy.papers.dsgd import dsgd
from hardy.papers.fat import fatavg, fatavg_dbn, fatbn, fatfree, fatmeta, fatprox, fatscaffold
from hardy.papers.fbn import fbn
from hardy.papers.fed_ensemble import fed_ensemble
from hardy.papers.fed_soft_better import fed_soft_better
from hardy.papers.fedavg import centralised, fedavg, fedprox, local_only
from hardy.papers.fedbn import fedbn
from hardy.papers.fedgkd import fedgkd
from hardy.papers.fedlc import fedlc
from hardy.papers.fednova import fednova
from hardy.papers.fedopt import fedadagrad, fedadam, fedavgm, fedyogi
from hardy.papers.fedrbn import fedrbn
from hardy.papers.fedrobust import fedrobust
from hardy.papers.fedrolex import fedrolex
from hardy.papers.fedwon import fedwon
from hardy.papers.fiarse import fiarse
from hardy.papers.fixbn import fixbn
from hardy.papers.gairat import fedgairat
from hardy.papers.hbn import hbn
from hardy.papers.heterofl import heterofl, sheterofl
from hardy.papers.moon import moon
from hardy.papers.oat import oat
from hardy.papers.per_fedavg import per_fedavg
from hardy.papers.scaffold import scaffold
from hardy.papers.sfat import sfat, sfat_prox, sfat_scaffold
from hardy.papers.silobn import silobn
from hardy.papers.split_mix import split_mix, split_mix_dat
from hardy.papers.synchronised import synchronised

__all__ = [
    "afl",
    "calfat",
    "centralised",
    "dbfat",
    "depthfl",
    "dsgd",
    "fatavg",
    "fatavg_dbn",
    "fatbn",
    "fatfree",
    "fatmeta",
    "fatprox",
    "fatscaffold",
    "fbn",
    "fed_ensemble",
    "fed_soft_better",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedavgm",
    "fedbn",
    "fedgairat",
    "fedgkd",
    "fedlc",
    "fednova",
    "fedprox",
    "fedrbn",
    "fedrobust",
    "fedrolex",
    "fedwon",
    "fedyogi",
    "fiarse",
    "fixbn",
    "hbn",
    "heterofl",
    "local_only",
    "moon",
    "oat",
    "per_fedavg",
    "scaffold",
    "sfat",
    "sfat_prox",
    "sfat_scaffold",
    "sheterofl",
    "silobn",
    "split_mix",
    "split_mix_dat",
    "synchronised",
]
