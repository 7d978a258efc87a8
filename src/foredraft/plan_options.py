"""The options of ``foredraft plan``, checked where they are made.

Owns: their ranges, and which of them contradict each other.  Does not know: what is computed from them.
"""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.hardware import BYTES_PER_VALUE
from foredraft.types import MAX_SPECULATIVE_TOKENS, ConfigError, refuse_unknown

THIS = "this"
EMITTERS = ("vllm",)
DEFAULT_CEILING = 8
MOST_REQUESTS = 4096
MOST_GPUS, MOST_TOKENS, MOST_GIB = 1024, 2**31 - 1, 10**9


@dataclass(frozen=True)
class PlanOptions:
    """What to plan for.

    ``model`` is anything that can be loaded, or the path of a ``config.json``; ``target_params`` is in its place.  ``draft``
    likewise; with ``draft_params`` it is a name only.  At most one of ``alpha``, ``from_log`` and ``measure`` says what is
    accepted.
    ``hardware`` None is ``this`` where the model can be loaded.  ``num_speculative_tokens`` is the largest K considered.

    Raises:
        ConfigError: a value out of its range, or options that contradict each other.
    """

    model: str | None = None
    draft: str | None = None
    alpha: float | None = None
    from_log: str | None = None
    measure: str | None = None
    hardware: str | None = None
    batches: tuple[int, ...] = (1, 4, 16, 64, 256)
    context: int | None = None
    memory_gib: float | None = None
    target_params: float | None = None
    draft_params: float | None = None
    num_speculative_tokens: int = DEFAULT_CEILING
    dtype: str | None = None
    gpus: int = 1
    emit: str | None = None

    def __post_init__(self) -> None:
        if (self.model is None) == (self.target_params is None):
            given = "both" if self.model is not None else "neither"
            raise ConfigError(f"a plan needs either MODEL or --target-params, and {given} is given; give one of them.")
        if self.hardware is None:
            if not self.can_load:
                raise ConfigError("a plan without a model to load needs --hardware; name one, such as h100, or a file.")
            object.__setattr__(self, "hardware", THIS)
        object.__setattr__(self, "batches", tuple(sorted(set(self.batches))))
        self._check_acceptance()
        self._check_numbers()
        self._check_this()
        if self.emit is not None:
            refuse_unknown("--emit", self.emit, EMITTERS)
            if not self.knows_acceptance:
                raise ConfigError(f"--emit {self.emit} needs an acceptance to plan with; add --alpha, --from-log or --measure.")

    @property
    def can_load(self) -> bool:
        """Whether MODEL has weights, as far as its name tells."""
        return self.model is not None and not self.model.endswith(".json")

    @property
    def is_here(self) -> bool:
        """Whether the plan is for this machine."""
        return self.hardware == THIS

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft model."""
        return self.draft is not None or self.draft_params is not None

    @property
    def knows_acceptance(self) -> bool:
        """Whether an acceptance is given or will be measured."""
        return self.alpha is not None or self.from_log is not None or self.measure is not None or self.is_here

    @property
    def replays_draft(self) -> bool:
        """Whether the draft model has to run over recorded answers."""
        return self.has_draft and self.alpha is None and self.knows_acceptance

    def _check_acceptance(self) -> None:
        given = [name for name in ("alpha", "from_log", "measure") if getattr(self, name) is not None]
        if len(given) > 1:
            first, second = (f"--{name.replace('_', '-')}" for name in given[:2])
            raise ConfigError(f"{first} and {second} contradict each other: both say what is accepted; leave one out.")
        if self.alpha is not None and not 0.0 <= self.alpha < 1.0:
            raise ConfigError(f"--alpha must be at least 0 and below 1, not {self.alpha:g}; change it.")
        if self.measure is not None and not self.can_load:
            raise ConfigError("--measure runs MODEL on this machine, and there are no weights to run; give a model, or --alpha.")
        if self.replays_draft and (self.draft_params is not None or not self.can_load or (self.draft or "").endswith(".json")):
            raise ConfigError(
                "what a draft model is right about can be replayed only where MODEL and the draft model can be loaded; "
                "give both, or --alpha."
            )

    def _check_numbers(self) -> None:
        if not self.batches or not all(isinstance(batch, int) and 1 <= batch <= MOST_REQUESTS for batch in self.batches):
            given = ",".join(map(str, self.batches))
            raise ConfigError(f"--batch must be whole numbers from 1 to {MOST_REQUESTS}, not {given}; change it.")
        if self.context is not None and not 2 <= self.context <= MOST_TOKENS:
            raise ConfigError(
                f"--context must be from 2, a token of the prompt and one of the answer, to {MOST_TOKENS}, not "
                f"{self.context!s:.20}; change it."
            )
        if not 1 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"--num-speculative-tokens must be from 1 to {MAX_SPECULATIVE_TOKENS}, not {self.num_speculative_tokens}; "
                "change it."
            )
        if self.memory_gib is not None and not 0.0 < self.memory_gib <= MOST_GIB:
            raise ConfigError(f"--memory must be above 0 and at most {MOST_GIB} GiB, not {self.memory_gib:g}; change it.")
        if not 1 <= self.gpus <= MOST_GPUS:
            raise ConfigError(f"--gpus must be from 1 to {MOST_GPUS}, not {self.gpus!s:.20}; change it.")
        if self.dtype is not None:
            refuse_unknown("--dtype", self.dtype, BYTES_PER_VALUE)

    def _check_this(self) -> None:
        if not self.is_here:
            return
        if not self.can_load:
            raise ConfigError("hardware 'this' is measured with MODEL's weights, and there are none; name another --hardware.")
        if self.draft is not None and self.draft.endswith(".json"):
            raise ConfigError("hardware 'this' is measured with the draft model's weights too; give a model that can be loaded.")
        for name, value in (("--gpus", self.gpus != 1), ("--dtype", self.dtype is not None), ("--draft-params", self.draft_params)):
            if value:
                raise ConfigError(f"{name} contradicts hardware 'this', which is measured as it is; leave it out.")
