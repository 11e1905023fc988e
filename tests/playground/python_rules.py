"""Hardy's aggregation rules on points in a plane, in the order of the page's."""

import torch

from hardy.core.messages import Slot, Updates
from hardy.core.partition import Role
from hardy.core.protocols import RoundContext
from hardy.parts.aggregators.base import mean, pipeline
from hardy.parts.aggregators.robust import coordinate_median, geometric_median, krum, trimmed_mean
from hardy.parts.aggregators.stages import nearest_neighbour_mixing


def rules(f):
    nnm = pipeline(pre=(nearest_neighbour_mixing(f=f),), rule=coordinate_median())
    return [mean(), coordinate_median(), trimmed_mean(f=f), krum(f=f), geometric_median(), nnm]


def rule_in_python(rule, points):
    matrix = torch.tensor(points, dtype=torch.float64)
    replies = Updates(
        slots=[Slot(at) for at in range(len(points))],
        shared={"w": matrix},
        reported={},
        weights=torch.ones(len(points), dtype=torch.float64),
        steps=torch.ones(len(points), dtype=torch.int64),
        loss=torch.ones(len(points), dtype=torch.float64),
    )
    context = RoundContext(
        shared={"w": torch.zeros(1, 2, dtype=torch.float64)}, roles={"w": Role.WEIGHT}, bases=1, clients=len(points)
    )
    return rule.finish(rule.fold(None, replies, context), context, rule.memory(context))[0]["w"][0].numpy()
