"""The tables of an experiment: a tree of dataclasses. The text under a key is its documentation."""

from dataclasses import dataclass, field
from typing import Literal

import hardy.callbacks
import hardy.models
import hardy.papers
import hardy.parts  # noqa: F401  (all of them register their parts)
from hardy.attacks.threats import parse_threat
from hardy.callbacks.base import Callback
from hardy.config.values import Table
from hardy.config.writing import dump, to_table
from hardy.core.admission import Admission
from hardy.core.clock import ClockChoice
from hardy.core.cohort import Cohort
from hardy.core.describe import non_defaults
from hardy.core.metric import Diagnosis, Metric
from hardy.core.protocols import Optimiser
from hardy.core.training import Training
from hardy.data.augmentation import Augmentation
from hardy.data.kinds import Affording
from hardy.data.population import PopulationChoice
from hardy.engines.auto import EngineChoice
from hardy.errors import HardyError
from hardy.faults.injection import Faults
from hardy.parts.compression import Compression
from hardy.parts.metrics import to_metrics
from hardy.user_code import code_table

FROM_PYTHON = "from Python"
"""stands in config.toml for what has no name"""
MOST_CLIENTS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class DataChoice:
    """`[data]`: which images or feature vectors, and who holds them."""

    source: str | Table = "mini_digits"
    """a name, the path of a file or folder, "hf:" and the id of a Hugging Face data set; or a table with it as name and
    the source's options"""
    folder: str | None = None
    """folder of real data; absent: that of --data or HARDY_DATA. A run remembers the one it was started with"""
    range: tuple[float, float] | None = None
    """least and greatest value of your own inputs, which become 0 and 1, such as [0, 4095]; bytes, uint16 and floats in
    [0, 1] need none, and feature vectors without one are used unchanged"""
    split: str | Table | None = None
    """how a domain's rows are dealt to its clients; absent: blocks, or natural where each file is a client"""
    clients: int = 2
    """clients a domain; in all, when pooled"""
    pooled: bool = False
    """deal the rows of all domains together"""
    validation: float = 0.1
    """share of a client's rows kept for validation"""
    test: Literal["split", "shared", "matched"] = "split"
    """test rows: cut among a domain's clients, all rows for each, or matched to a client's classes"""
    limit: int | None = None
    """training rows a domain"""
    held_out: tuple[str, ...] = ()
    """domains without clients, such as ["svhn"]: accuracy and robustness there are those of a new client's network"""
    held_out_statistics: Literal["average", "images"] = "average"
    """norm statistics of that network: the clients' average, or measured on the domain's training images, whose labels
    nobody sees"""
    shift: str | Table | None = None
    """how the clients' devices differ: each takes its training and validation rows in its own way"""
    shift_test: bool = False
    """test rows are shifted by the clients' devices too; else they are unchanged, as in FedRobust"""
    augmentation: Augmentation | None = None
    """how each training step changes its images at random, such as { name = "crop_flip", padding = 4 }; evaluation sees
    unchanged images. Absent: not at all"""
    adversarial: Affording = None
    """who is of kind AT, for objective by_kind: a share of each domain's clients (of all, when pooled), rounded down, a
    list of domains or of clients' numbers, or a share for each of some domains ({ mnist = 0.2 }); the others are ST.
    Absent: all can afford it"""
    capacity: str | Table | None = None
    """the width each client can train, a share of the ×1 network's; absent: 1 for all"""

    def __post_init__(self) -> None:
        if self.clients > MOST_CLIENTS:
            raise HardyError(f"data.clients is {self.clients}; it must be at most {MOST_CLIENTS:,}.")
        if self.held_out_statistics != "average" and not self.held_out:
            raise HardyError("data.held_out_statistics has no effect without data.held_out. Leave it out.")
        if self.shift_test and self.shift is None:
            raise HardyError("data.shift_test is true, but there is no data.shift, so it has no effect. Leave it out.")


@dataclass(frozen=True, kw_only=True)
class EvaluationChoice:
    """`[evaluation]`: when accuracy is measured."""

    every: int = 1
    """rounds between two evaluations; the last round is always evaluated"""
    threats: tuple[str, ...] = ()
    """attacks the finished run is measured under, such as ["pgd-20", "autoattack"]"""
    clients: int | None = None
    """clients that are measured and listed, drawn once; absent: all, or 1,000 where there are more than 10,000"""
    checks: bool = True
    """look for red flags when the threats are measured, which may take longer than the threats do"""
    select: str | None = None
    """attack under which accuracy on validation rows chooses the best round; absent: clean accuracy does, which may
    keep rising in adversarial training while robustness falls"""
    attack_branch: str | None = None
    """branch of statistics that the attacks use; absent: the one that predicts"""
    predict_branch: str | None = None
    """branch of statistics that classifies images, attacked or not; absent: the one that the norm serves with"""
    robustness: tuple[float, ...] = ()
    """levels λ at which every width of the finished run is measured, under the threats too; needs a dual norm"""
    metrics: tuple[Metric, ...] = ()
    """figures to measure for each client besides accuracy, such as ["auroc", "ece"]; under the threats too"""
    select_metric: str | None = None
    """the one of `metrics` that chooses the best round on validation rows; absent: accuracy"""
    diagnosis: tuple[Diagnosis, ...] = ()
    """figures of the training itself to record at every evaluation, such as ["primal_gap"]"""
    drift: bool = False
    """record each round how far the clients' weights lie apart; costs a pass over all replies, held in memory"""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise HardyError(f"evaluation.every is {self.every}; it must be 1 or more.")
        if self.clients is not None and self.clients < 1:
            raise HardyError(f"evaluation.clients is {self.clients}; it must be 1 or more, or absent.")
        object.__setattr__(self, "metrics", to_metrics(self.metrics))
        if not self.checks and not self.threats:
            raise HardyError(
                "evaluation.checks is false, but there are no evaluation.threats: it has no effect. Leave it out."
            )
        if self.select_metric is not None and self.selecting_metric is None:
            named = ", ".join(metric.name for metric in self.metrics) or "none"
            raise HardyError(
                f"evaluation.select_metric is {self.select_metric!r}, but evaluation.metrics names {named}. Name it "
                "there too."
            )
        for threat in (*self.threats, *self.selecting):
            parse_threat(threat)
        for level in self.robustness:
            if not 0 <= level <= 1:
                raise HardyError(f"evaluation.robustness holds {level}; each level must be in [0, 1].")

    @property
    def selecting(self) -> tuple[str, ...]:
        """The attack of `select`, if there is one."""
        return (self.select,) if self.select else ()

    @property
    def selecting_metric(self) -> Metric | None:
        """The metric of `select_metric`; None: accuracy."""
        return next((metric for metric in self.metrics if metric.name == self.select_metric), None)


@dataclass(frozen=True, kw_only=True)
class ServerChoice:
    """`[server]`: rows of the server's own, for a rule that compares clients with training on them (fltrust)."""

    rows: int = 0
    """how many; 0: none"""
    source: str | Table | None = None
    """where they come from, as in data.source; absent: training rows of the clients, who then no longer hold them"""

    def __post_init__(self) -> None:
        if self.rows < 0:
            raise HardyError(f"server.rows is {self.rows}; it must be 0 or more.")
        if self.source is not None and not self.rows:
            raise HardyError(f"server.source is {self.source!r}, but server.rows is 0, so it has no effect. Set both.")


@dataclass(frozen=True, kw_only=True)
class CheckpointChoice:
    """`[checkpoint]`: when the run is saved."""

    every: int | None = None
    """rounds between two checkpoints; absent: as often as costs less than a twentieth of the time"""

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise HardyError(f"checkpoint.every is {self.every}; it must be 1 or more, or absent.")


@dataclass(frozen=True, kw_only=True)
class NetworkChoice:
    """`[network]`: what a run over Flower expects of its nodes."""

    clients: int | None = None
    """nodes the run is for; absent: as many as [data] makes clients"""
    deadline: float = 600.0
    """seconds a round waits for a reply; who was silent in training is not asked to evaluate in that round"""
    replies: int = 1
    """fewest replies a round needs; with fewer the missing clients are asked again"""
    patience: float = 1800.0
    """seconds to wait for the first roll call, or for enough replies, before giving up"""
    secure: bool = False
    """secure aggregation: nodes mask what they send, and the server can read the sum alone. The method's rule must be
    the mean, and of three clients a round or more, more than two thirds must stay to its end"""
    compression: Compression | None = None
    """of what clients send up; absent: every bit travels, and the run is that of the other engines"""

    def __post_init__(self) -> None:
        for name in ("deadline", "patience"):
            if not getattr(self, name) > 0:
                raise HardyError(f"network.{name} is {getattr(self, name)}; it must be above 0 seconds.")
        if self.replies < 1:
            raise HardyError(f"network.replies is {self.replies}; it must be 1 or more.")
        if self.secure and self.compression is not None:
            raise HardyError("network.compression cannot be read in a masked sum; leave it or network.secure out.")
        if self.clients is not None and not 1 <= self.clients <= MOST_CLIENTS:
            raise HardyError(f"network.clients is {self.clients}; it must be in [1, {MOST_CLIENTS:,}], or absent.")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything a run depends on."""

    name: str = "experiment"
    """names the run folder and the report"""
    seed: int = 0
    """all randomness follows from it"""
    rounds: int = 20
    """rounds of the federation"""
    imports: tuple[str, ...] = ()
    """modules or files of your own that are imported first, so that the parts in them have names"""
    data: DataChoice = field(default_factory=DataChoice)
    model: str | Table = "tiny_cnn"
    """a name, or a table with a name and the model's options"""
    method: str | Table = "fedavg"
    """a name, or a table with a name, the method's options, and parts in place of its own"""
    optimiser: Optimiser | None = None
    """how clients step; absent: the method's own, plain SGD for most. A method adds its links (SCAFFOLD's control)"""
    training: Training = field(default_factory=Training)
    population: PopulationChoice = field(default_factory=PopulationChoice)
    cohort: Cohort = field(default_factory=Cohort)
    clock: ClockChoice = field(default_factory=ClockChoice)
    server: ServerChoice = field(default_factory=ServerChoice)
    faults: Faults = field(default_factory=Faults)
    admission: Admission = field(default_factory=Admission)
    engine: EngineChoice = field(default_factory=EngineChoice)
    network: NetworkChoice = field(default_factory=NetworkChoice)
    evaluation: EvaluationChoice = field(default_factory=EvaluationChoice)
    checkpoint: CheckpointChoice = field(default_factory=CheckpointChoice)
    init: str | None = None
    """trained tensors to start from: a run folder, or a state_dict in a .safetensors or .pt file; absent: random"""
    init_head: bool = True
    """whether the last layer is started from them too; false for another number of classes"""
    callbacks: tuple[Callback, ...] = ()
    """what happens after each round, such as [{ name = "early_stopping", patience = 5 }, "tensorboard"]"""

    def __post_init__(self) -> None:
        if not self.name or self.name in (".", "..") or len(self.name) > 100 or not _names_a_folder(self.name):
            raise HardyError(
                f"name is {self.name!r}; it names a folder in runs/: at most 100 characters, not . or .., without / "
                "and \\, line ends and other control characters."
            )
        if self.rounds < 1:
            raise HardyError(f"rounds is {self.rounds}; it must be 1 or more.")
        if not self.init_head and self.init is None:
            raise HardyError("init_head is false, but there is no init, so it has no effect. Leave it out.")
        if not 0 <= self.seed < 2**63:
            raise HardyError(f"seed is {self.seed}; it must be in [0, 2^63).")
        self._refuse_beside_population()
        if self.network != NetworkChoice() and self.engine.name not in ("flower", "auto"):
            raise HardyError(
                f"[network] has no effect with engine {self.engine.name!r}. Leave it out, or take engine flower."
            )
        if self.admission.most_rows != Admission().most_rows and self.engine.name not in ("flower", "auto"):
            raise HardyError(
                f"admission.most_rows has no effect with engine {self.engine.name!r}: nobody registers. Leave it out."
            )

    def _refuse_beside_population(self) -> None:
        """What has no effect where clients are drawn and rows are not dealt."""
        if not self.population.clients:
            return
        for key in ("split", "clients", "pooled", "test"):
            if (given := getattr(self.data, key)) != getattr(DataChoice, key):
                raise HardyError(
                    f"data.{key} is {given!r}, but [population] draws the clients, so it has no effect. Leave it out."
                )
        if self.engine.name == "flower":
            raise HardyError("[population] needs an engine on this machine: over a network clients are nodes.")
        if self.server.rows and self.server.source is None:
            raise HardyError(
                f"server.rows is {self.server.rows}, which are taken from clients, and a population's rows are drawn "
                "when they are asked for. Give server.source."
            )

    def __repr__(self) -> str:
        return non_defaults(self)

    def to_toml(self) -> str:
        """TOML that `read` takes; with the hashes of the files of code that it names."""
        table = to_table(self)
        return dump(table | ({"code": code} if (code := code_table(table)) else {}))


def _names_a_folder(name: str) -> bool:
    return name.isprintable() and not set(name) & {"/", "\\"}
