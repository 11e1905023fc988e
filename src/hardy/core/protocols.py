"""The kinds of part a method is made of, as the core sees them.

A part is a frozen, keyword-only dataclass. Its methods are pure: state is passed in and returned. The parts themselves
are in `hardy.parts` and `hardy.papers`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from torch import Tensor, nn

from hardy.core import tensors
from hardy.core.account import Mechanism, Sampling
from hardy.core.federation import Client, sorts_of
from hardy.core.gradients import gradients
from hardy.core.layers import Statistics
from hardy.core.messages import Slot, Updates
from hardy.core.net import Net
from hardy.core.partition import Placement, Role, Tag
from hardy.core.ranks import Ranks
from hardy.core.tensors import ImageShape, Tensors
from hardy.core.training import Training
from hardy.errors import HardyError
from hardy.registry import kind

if TYPE_CHECKING:
    from hardy.core.method import Method, Plan
    from hardy.core.submodels import Submodels

Fact = Literal["kind", "capacity"]
"""what is known of a client besides its rows"""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a method is going to work on, for `Part.check`."""

    clients: Sequence[Client]
    training: Training
    cohort: int
    """clients asked in a round; of Poisson cohorts, expected"""
    sampling: Sampling = "fixed"
    """how they are drawn"""

    @property
    def sorts(self) -> Sequence[Client]:
        """Clients in which every kind, capacity and number of training rows is found: all, or few of very many."""
        return sorts_of(self.clients)


class Part:
    """What all parts have in common: they say what they need of each other and of the clients."""

    @property
    def consumes(self) -> frozenset[Fact]:
        """The facts of a client it looks at. A fact that is given but consumed by no part is refused."""
        return frozenset()

    def check(self, method: "Method", setting: Setting) -> None:
        """Refuses what would not work, or would have no effect, beside the method's other parts and these clients."""

    def mechanisms(self, plan: "Plan", setting: Setting, rounds: int, asked: Sequence[int]) -> Sequence[Mechanism]:
        """The noisy sums that it has given away after so many rounds, for the privacy account; `asked` says how many
        networks each client was asked to train in them, one a round with most budgets."""
        return ()


def walk(part: object) -> Iterator[Part]:
    """A part and all parts inside it."""
    return (found for found in within(part) if isinstance(found, Part))


def within(part: object) -> Iterator[object]:
    """A part and all parts and dataclasses inside it."""
    if isinstance(part, Part) or (is_dataclass(part) and not isinstance(part, type)):
        yield part
    if isinstance(part, tuple):
        for one in part:
            yield from within(one)
    elif is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            yield from within(getattr(part, field.name))


def name_part(part: object) -> str:
    """The name of a part in messages."""
    return type(part).__name__


# Norm


class Givers(NamedTuple):
    """Clients whose statistics the server gives to others."""

    reported: Tensors
    """[C, B, ...]"""
    clients: Sequence[Client]


InferenceStatistics = Literal["running", "batch", "recomputed"]


@kind("norm")
@dataclass(frozen=True, kw_only=True)
class Norm(Part):
    """The part that owns the tensors of the normalisation layers."""

    keeps: ClassVar[type[Statistics]] = Statistics

    @property
    def branches(self) -> frozenset[str] | None:
        """The branches of statistics a layer has; None: it keeps none, and any branch will do."""
        return frozenset({"clean"})

    @property
    def serving_branch(self) -> str:
        """The branch whose statistics predictions are made with, unless somebody asks for another."""
        return "clean"

    @property
    def inference_statistics(self) -> InferenceStatistics:
        """Which statistics a client is served with."""
        return "running"

    def layer(self, features: int) -> nn.Module:
        """A normalisation layer."""
        raise NotImplementedError

    def prepare(self, model: nn.Module) -> nn.Module:
        """The network built around its layers, as it is to be trained: a norm that needs more than layers of its own,
        such as other convolutions, makes them here."""
        return model

    @property
    def synchronised(self) -> bool:
        """Whether each step of a client needs those of all others, layer by layer: all then run in one call."""
        return False

    def statistics_of(self, features: int, *, affine: bool) -> Statistics:
        """What a layer keeps for a branch of this norm."""
        raise NotImplementedError

    def placement(self, tag: Tag) -> Placement:
        """Where a tensor of a norm layer lives."""
        return Placement.SHARED

    def frozen(self, round_number: int) -> bool:
        """Whether clients of this round train on running statistics, and leave them."""
        return False

    def statistics_rule(self, branch: str, rule: "Aggregator") -> "Aggregator":
        """How shared statistics of a branch are aggregated, where the method has this rule for them."""
        return rule

    @property
    def reads(self) -> frozenset[str]:
        """The other branches whose statistics `exchange` looks at, so that they must not stay private."""
        return frozenset()

    @property
    def exchanges(self) -> bool:
        """Whether `exchange` does anything."""
        return type(self).exchange is not Norm.exchange

    def gives(self, client: Client) -> bool:
        """Whether `exchange` gives statistics of this client to others."""
        return True

    @property
    def most_givers(self) -> int | None:
        """How many clients give at most, those that were heard last; None: all."""
        return None

    def exchange(
        self, reported: Tensors, tags: Mapping[str, Tag], clients: Sequence[Client], givers: "Givers | None" = None
    ) -> Tensors:
        """What the server does to reported statistics between rounds, [C, B, ...]. It is shown those of all branches;
        what it returns for a branch that is not its own is left aside. Where there are too many clients to look at, it
        is shown those of some, just before they are needed, and apart from them those of the clients that give."""
        return reported


# Objective


class Batch(NamedTuple):
    """Images in [0, 1] and labels of one step, and what an objective may know of the rest of the client's rows."""

    x: Tensor
    y: Tensor
    label_counts: Tensor
    """[K], how many training rows of each class the client holds; they never leave it"""


class StepResult(NamedTuple):
    """What a client found out in one step."""

    gradient: Tensors
    """of the trained tensors; after the optimiser, the direction or the change it made of it"""
    adversary: Tensors
    """gradient of the private tensors, where the objective plays them against the weights"""
    buffers: Tensors
    """statistics and counters as the passes left them"""
    loss: Tensor
    optimiser: Tensors = {}  # noqa: RUF012
    """the optimiser's state after the step"""


@kind("objective")
@dataclass(frozen=True, kw_only=True)
class Objective(Part):
    """The part that says what a step minimises. `loss` is all an objective needs; it runs under vmap."""

    @property
    def branches(self) -> frozenset[str]:
        """The branches of statistics its passes go through."""
        return frozenset({"clean"})

    @property
    def has_adversary(self) -> bool:
        """Whether its private tensors climb the loss that the weights descend."""
        return False

    def private(self, shape: ImageShape, batch: int) -> Tensors:
        """Private tensors it adds, with their first values, for images and batches of this size."""
        return {}

    def kept(self, model: Tensors) -> Tensors:
        """Private tensors it makes of the network's own, with their first values, for a client to keep from round to
        round; `finish` moves them."""
        return {}

    def finish(self, private: Tensors, model: Tensors) -> Tensors:
        """Its private tensors at the end of a round, when the network's are these; of one slot, or of a stack."""
        return private

    @property
    def mixes_examples(self) -> bool:
        """Whether what an example costs hangs on other rows of the client, besides the batch of a norm."""
        return self.has_adversary

    @property
    def adds_rows(self) -> bool:
        """Whether its gradient adds a term of the client's rows to that of the objective inside."""
        return False

    def for_client(self, kind: str, round_number: int) -> "Objective":
        """The objective of a client of this kind (AT, ST or "") in a round."""
        return self

    def alone(self) -> "Objective":
        """What a client goes on with when the federation is over."""
        return self

    def loss(self, net: Net, private: Tensors, batch: Batch, key: Tensor) -> Tensor:
        """What a step minimises, and what the client reports."""
        raise NotImplementedError

    def gradient(
        self, outer: "Objective", net: Net, private: Tensors, batch: Batch, key: Tensor, received: Tensors
    ) -> StepResult:
        """The gradient of a step. `outer` is the outermost objective around this one: its loss is differentiated.
        A term that is minimised but not reported is added to the gradient here (see `proximal`)."""

        def total(trained: Tensors, private: Tensors) -> tuple[Tensor, tuple[Tensor, Tensors]]:
            here = net.at(trained)
            loss = outer.loss(here, private, batch, key)
            return loss, (loss, here.buffers)

        wanted = (0, 1) if outer.has_adversary else (0,)
        (gradient, *climbed), loss, buffers = gradients(total, (net.trained, private), wanted)
        return StepResult(gradient, climbed[0] if climbed else {}, buffers, loss)

    def step_adversary(self, private: Tensors, gradient: Tensors) -> None:
        """A step of ascent on the private tensors, in place, on those of one slot or of a stack of slots: numbers that
        differ by slot broadcast with `tensors.expand_trailing`."""


@dataclass(frozen=True, kw_only=True)
class Wrapper(Objective):
    """An objective around another one. Whatever it does not define itself is the inner one's, also what is added to
    `Objective` in future; an objective that the inner one returns is wrapped again."""

    inner: Objective


def _forward(name: str) -> Any:
    if isinstance(vars(Objective)[name], property):
        return property(lambda self: getattr(self.inner, name))

    def call(self: Wrapper, *arguments: Any, **options: Any) -> Any:
        found = getattr(self.inner, name)(*arguments, **options)
        return replace(self, inner=found) if isinstance(found, Objective) else found

    return call


for _name in (name for name in vars(Objective) if not name.startswith("_")):
    setattr(Wrapper, _name, _forward(_name))


# Optimiser


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a client's round went, for `Optimiser.finish`; tensors of one slot, or of a stack of slots."""

    start: Tensors
    """trained tensors as received"""
    end: Tensors
    received: Tensors
    state: Tensors
    """the optimiser's"""
    steps: Tensor
    rate: Tensor


InPlace = Callable[[Tensors, Tensors, Tensors, Tensor, Tensors, Tensors], None]
"""step(weights, gradient, state, rate, rounded, begin); rounded copies of weights, where there are any, move along;
weights in `begin` start from these values, one tensor for all slots, and not from their own"""


@kind("optimiser")
@dataclass(frozen=True, kw_only=True)
class Optimiser(Part):
    """The part that turns gradients into steps. Links of a chain change the gradient; the last one makes the step."""

    @property
    def makes_step(self) -> bool:
        """Whether `update` returns the change of the weights, and not a changed gradient."""
        return False

    @property
    def links(self) -> "tuple[Optimiser, ...]":
        """The optimisers it is a chain of."""
        return (self,)

    @property
    def kept(self) -> bool:
        """Whether the client keeps the state between rounds; otherwise it is born anew with each."""
        return False

    @property
    def in_place(self) -> InPlace | None:
        """Takes the last link's step in place, in one pass over memory, on one slot or a stack of slots; None: what
        its `update` returns is added to the weights."""
        return None

    def init(self, trained: Tensors, shared: Collection[str]) -> Tensors:
        """Its state for these trained tensors of one slot, of which the named ones are shared: zeros, under names that
        begin with a word of its own, such as `momentum.conv1.weight`."""
        return {}

    def kept_state(self, trained: Tensors, shared: Collection[str]) -> Tensors:
        """The part of the state that the client keeps between rounds."""
        return self.init(trained, shared) if self.kept else {}

    def shared(self, trained: Tensors) -> Tensors:
        """Shared tensors it adds, with their first values; `trained` are the shared trained ones (SCAFFOLD's c)."""
        return {}

    def update(
        self, gradient: Tensors, state: Tensors, params: Tensors, received: Tensors, rate: Tensor, key: Tensor
    ) -> tuple[Tensors, Tensors]:
        """(the next gradient, or the change of the weights; the state it leaves). Pure; runs under vmap."""
        raise NotImplementedError

    def finish(self, outcome: Outcome) -> tuple[Tensors, Tensors]:
        """(the state to keep, values of the added shared tensors to send up) at the end of a round."""
        return outcome.state, {}


# Budget


@kind("budget")
@dataclass(frozen=True, kw_only=True)
class Budget(Part):
    """The part that turns a cohort into slots, and base networks into the network served at a width."""

    @property
    def bases(self) -> int:
        """How many base networks the server holds."""
        return 1

    @property
    def base_width(self) -> float | None:
        """The width of the model that is built; None: the one `model.width` says."""
        return None

    @property
    def widths(self) -> tuple[float, ...]:
        """The widths that can be served, the widest last."""
        return (1.0,)

    @property
    def best_first(self) -> bool:
        """Whether the bases are served in the order of their validation accuracy."""
        return False

    def networks(self, build: Callable[[], nn.Module]) -> list[nn.Module]:
        """The base networks as they are first built, each with random values of its own."""
        return [build() for _ in range(self.bases)]

    def prepare(self, model: nn.Module, norm: Norm, shape: ImageShape) -> nn.Module:
        """A base network as it is to be trained: a budget that needs more than the network given, such as exits on the
        way, adds them here."""
        return model

    def submodels(self, model: nn.Module, shape: ImageShape) -> "Submodels | None":
        """The sub-networks of a model that clients of small capacity train; None: everybody trains all of it."""
        return None

    def assign(self, round_number: int, cohort: Sequence[int], clients: Sequence[Client], seed: int) -> list[Slot]:
        """The slots of a round: a pure function of its arguments, so that a resumed run goes on with the same."""
        return [Slot(client) for client in cohort]

    def shares_statistics(self, giver: float, taker: float) -> bool:
        """Whether the statistics of a client of capacity `giver` are right in the network of one of capacity `taker`:
        not where a layer has other inputs in each."""
        return True

    def serve(
        self, held: Tensors, width: float, submodels: "Submodels | None" = None, rounds: int = 0
    ) -> list[Tensors]:
        """The networks whose mean answers at a width, out of the tensors of all bases, [B, ...], after so many
        rounds."""
        if width != 1:
            raise HardyError(
                f"width {width} cannot be served: this run trained one network, so it must be 1. Methods split_mix, "
                "heterofl and fed_ensemble train several widths at once."
            )
        return [tensors.gather(held, 0)]


# Aggregator


def _one_pass(client: int) -> float:
    return 1.0


@dataclass(frozen=True, kw_only=True)
class RoundContext:
    """What a rule may know of the round besides the updates."""

    shared: Tensors
    """[B, ...], as sent down"""
    roles: Mapping[str, Role]
    bases: int
    clients: int
    """all clients, in the cohort or not"""
    cohort: int = 0
    """clients asked in a round, or expected; 0: as many as have answered"""
    momentum: float = 0.0
    """of the clients' optimiser, born anew each round"""
    round: int = 0
    """rounds done"""
    kinds: Sequence[str] = ()
    """AT, ST or "", one for each client"""
    capacities: Sequence[float] = ()
    """share of the full width a client can train, one for each client"""
    submodels: "Submodels | None" = None
    """the sub-networks that clients train"""
    seed: int = 0
    """of the experiment: a rule that draws takes `random.stream(seed, round, ...)`"""
    server_update: Updates | None = None
    """what training on the server's own rows gave, where it has some: one update a base"""
    passes: Callable[[int], float] = _one_pass
    """client -> how often its rows pass through its network in the round: examples seen / examples held"""

    def held(self, client: int) -> Tensors:
        """Which entries of the shared tensors a client trains in this round, true or false; one without: all."""
        if self.submodels is None:
            return {}
        capacity = self.capacities[client]
        if capacity not in self._held:
            self._held[capacity] = self.submodels.held(capacity, self.round, self.shared)
        return self._held[capacity]

    @cached_property
    def _held(self) -> dict[float, Tensors]:
        return {}


@kind("aggregator")
@dataclass(frozen=True, kw_only=True)
class Aggregator(Part):
    """The part that writes the shared tensors. `combine` is all a rule needs; a linear one overrides `fold`."""

    @property
    def claims(self) -> frozenset[Role]:
        """Roles this aggregator has a rule of its own for: they must be shared."""
        return frozenset()

    @property
    def uses_weights(self) -> bool:
        """Whether the rule has a weighted form: the weights of the updates are how much each one counts."""
        return False

    @property
    def min_updates(self) -> int:
        """The smallest number of updates of a base it works with."""
        return 1

    def tolerates(self, weights: Tensor) -> bool:
        """Whether it works with updates of a base that weigh so much: enough of them, and few of them too heavy."""
        return len(weights) >= self.min_updates

    def outweighed(self, weights: Tensor) -> bool:
        """Whether the heaviest of updates that weigh so much decides alone."""
        return False

    def memory(self, context: RoundContext) -> Tensors:
        """What the aggregator remembers between rounds, with its first values."""
        return {}

    def fold(self, folded: Any, updates: Updates, context: RoundContext) -> Any:
        """Takes in more updates; `folded` is None at first."""
        return [*(folded or []), updates]

    def merge(self, folded: Any, ranks: Ranks) -> Any:
        """What all ranks have folded, where each has folded those of its own clients. Here updates are gathered; a
        rule with a fold of its own overrides it: of a running sum it is `ranks.total(folded)`."""
        return [updates for part in ranks.gather(folded or []) for updates in part] or None

    def finish(self, folded: Any, context: RoundContext, memory: Tensors) -> tuple[Tensors, Tensors]:
        """The next shared tensors and memory. A base keeps its value if the rule does not tolerate its updates."""
        if not folded:
            return context.shared, memory
        shared = tensors.apply(Tensor.clone, context.shared)
        for base, updates in by_base(folded):
            if self.tolerates(updates.weights):
                for name, value in self.combine(updates, context).items():
                    shared[name][base] = value
        return shared, memory

    def combine(self, updates: Updates, context: RoundContext) -> Tensors:
        """One value for each shared tensor out of the stacked values of one base."""
        raise NotImplementedError

    def served(self, shared: Tensors, memory: Tensors) -> Tensors:
        """The shared tensors that predictions are made with, where these are not those that training goes on with."""
        return shared

    def figures(self, memory: Tensors) -> dict[str, Any]:
        """What metrics.jsonl is told of the round that left this memory."""
        return {}


def by_base(folded: Sequence[Updates]) -> Iterator[tuple[int, Updates]]:
    """Each base and its updates, which are large: copied only if there is more than one part or base."""
    updates = Updates.join(folded)
    bases = sorted({slot.base for slot in updates.slots})
    for base in bases:
        yield base, updates if len(bases) == 1 else updates.where(updates.bases == base)
