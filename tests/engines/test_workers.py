"""--workers: who owns whom, what is refused, a rank that dies, another number of workers."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import assert_close, everything, federation, fit, net

import hardy
from hardy import papers
from hardy.cli import main
from hardy.core.messages import Updates
from hardy.core.ranks import ALONE
from hardy.engines.distributed import digest, owners
from hardy.registry import PARTS
from hardy.runs import workers
from hardy.runs.prepare import prepare

SMALL = ["rounds=4", "data.limit=30", "data.source.name=mini_digits", "checkpoint.every=1", "engine.precision=float64"]
SCAFFOLD = [*SMALL, "method=scaffold", "method.norm=local", "engine.name=sequential", "evaluation.threats=[]"]
WAIT = 120
"""seconds, on a busy machine"""


def experiment(name: str, *more: str):
    return hardy.read("demo", [*SCAFFOLD, f"name={name}", *more])


# Owners


def test_owners_share_the_cost_and_nothing_else():
    costs = [8.0, 8.0, *[1.0] * 8, 3.0]
    owner = owners(costs, 3)
    loads = [sum(c for c, at in zip(costs, owner, strict=True) if at == rank) for rank in range(3)]
    assert set(owner) == {0, 1, 2} and max(loads) - min(loads) <= 3
    assert owners(costs, 3) == owner
    assert sorted(owners([1.0] * 5, 5)) == [0, 1, 2, 3, 4]  # nobody without a client


def test_a_client_that_attacks_costs_what_its_passes_do():
    chosen = {"data": {"adversarial": ["pen"], "limit": 30}, "method": "fedrbn"}
    run = prepare(hardy.read("demo", ["method=fedrbn", "data.limit=30", 'data.adversarial=["pen"]']))
    costs = dict(zip(run.engine.data.clients, workers.client_costs(run), strict=True)) if False else None
    costs = workers.client_costs(run)
    by_kind = {kind: [c for c, client in zip(costs, run.engine.data.clients, strict=True) if client.kind == kind] for kind in ("AT", "ST")}
    assert chosen and min(by_kind["AT"]) > 3 * max(by_kind["ST"])
