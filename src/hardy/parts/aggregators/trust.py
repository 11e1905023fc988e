"""FLTrust: what clients send is weighed by how far it points where training on rows of the server's own points.

Cao et al., FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping, NDSS 2021, Algorithm 2.

Δ_0 how far the weights move in training on the server's rows · Δ_i in that of client i
1. The trust in client i is max(0, cos(Δ_i, Δ_0)).
2. Its move is brought to the length of Δ_0.
3. x moves by the mean of these moves, weighted by trust.
"""

from dataclasses import dataclass
from typing import ClassVar

from hardy.core.messages import Updates
from hardy.core.protocols import Aggregator, RoundContext
from hardy.core.tensors import Tensors
from hardy.errors import HardyError
from hardy.parts.aggregators.base import narrow
from hardy.parts.aggregators.distances import STEPPED, as_tensors, blend, sent_down
from hardy.registry import part


@part("aggregator", name="fltrust")
@dataclass(frozen=True, kw_only=True)
class FLTrust(Aggregator):
    """The mean of the moves, each as long as the server's own, weighted by its cosine with that if it is above 0.

    With Δ_0 = (2, 0), Δ_1 = (6, 0), Δ_2 = (0, 3) and Δ_3 = (−1, 0) the trust is 1, 0 and 0: x moves by (2, 0). It holds
    however many clients lie, as long as the server's rows ([server]) are like theirs. Running statistics are the mean
    by trust of what clients sent. Where no client is trusted the base keeps its value.
    """

    needs_server_rows: ClassVar[bool] = True

    def combine(self, updates: Updates, context: RoundContext) -> Tensors:
        weights = [name for name in updates.shared if context.roles[name] in STEPPED]
        if context.server_update is None or not weights:
            raise HardyError(
                "fltrust compares weights with an update of the server's own. Give [server] rows, and let "
                "it combine the weights."
            )
        base = updates.slots[0].base
        own = context.server_update.where(context.server_update.bases == base)
        judged, here = updates.only(weights), narrow(context, weights)
        moves = (judged.matrix - sent_down(judged, here)).double()
        wanted = (own.only(weights).matrix - sent_down(judged, here)).double()[0]
        lengths, length = moves.norm(dim=1).clamp_min(1e-30), wanted.norm()
        trust = (moves @ wanted / (lengths * length.clamp_min(1e-30))).clamp_min(0.0)
        share = trust / trust.sum().clamp_min(1e-30)
        rest = [name for name in updates.shared if name not in weights]
        kept = updates.only(rest)
        found = as_tensors(blend((share * length / lengths)[None], judged, here)[0], judged, here)
        return found | as_tensors(blend(share[None], kept, narrow(context, rest))[0], kept, narrow(context, rest))


def trusts_server(part: object) -> bool:
    """Whether a part compares clients with an update of the server's own."""
    return getattr(part, "needs_server_rows", False) is True


fltrust = FLTrust
__all__ = ["fltrust", "trusts_server"]
