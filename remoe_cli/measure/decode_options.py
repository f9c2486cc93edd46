"""The options of `remoe decode`, and those that `remoe eval` shares with it: checked, each mistake with the command that mends it."""

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from remoe_cli.cache import choose
from remoe_cli.cache.expert_cache import ADMISSIONS, unfit
from remoe_cli.cache.policy import SCORES
from remoe_cli.cache.prefetch.predictor import Predictor
from remoe_cli.cache.reroute import Rule
from remoe_cli.errors import CacheError, command, instead, MemoryShortError, UsageError
from remoe_cli.families import KINDS
from remoe_cli.measure.decode_checks import check_heavy, check_sessions
from remoe_cli.offload.pack import check_form
from remoe_cli.offload.sampling import Sampling
from remoe_cli.offload.settings import IO, MOST_READERS, Settings, WARMS
from remoe_cli.sizes import parse_rate, parse_size

PROMPT = "The module defines the following"
_AMOUNT = re.compile(r"-?[0-9]{1,18}")

Again = Callable[..., str]  # the command with some options changed; None leaves one out


@dataclass(frozen=True)
class Asked:
    """The options of `remoe decode` as given. cache, throttle, batch and tokens may be comma lists. cache: None where a command
    finds the number itself."""

    cache: str | None
    delta: str | None = None
    prompt: str | None = None
    prompts: str | None = None
    requests: int | None = None
    context: int | None = None
    tokens: str = "32"
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    policy: str = "lru"
    admission: str = "forced"
    warm: str = "cold"
    ram: str | None = None
    guess: int = 0
    in_place: bool = False
    batch: str = "1"
    sessions: int = 1
    throttle: str | None = None
    readers: int = 2
    io: str = "direct"
    pack: Path | None = None
    experts: str | None = None
    heavy: float | None = None
    floor: bool = False
    threads: int | None = None
    device: str | None = None
    reroute: str | None = None
    forced: bool = False
    beside_base: bool = False
    predictor: Path | None = None

    def command(self, model: str, **changes: Any) -> str:
        """`remoe decode` with these options, some of them changed; None leaves one out."""
        return command("decode", model, **self.given(**changes))

    @property
    def flexible(self) -> bool:
        """Whether fewer new tokens will do where the model has no room for so many."""
        return False

    def given(self, **changes: Any) -> dict[str, Any]:
        """Those that are not as by default, some of them changed."""
        options = {**{field.name: getattr(self, field.name) for field in fields(self)}, **changes}
        defaults = {field.name: field.default for field in fields(self)}
        return {name: of for name, of in options.items() if of != defaults[name]}


@dataclass(frozen=True)
class Plan:
    """The checked options; a sweep runs every combination of throttles, batches, tokens and capacities.

    throttles: bytes a second, None for none. settings: all but the throttle. sampling: None for greedy.
    """

    capacities: list[int]
    tokens: list[int]
    batches: list[int]
    throttles: list[float | None]
    settings: Settings
    sampling: Sampling | None


@dataclass(frozen=True)
class Measuring:
    """The options of `remoe eval` on how the timed decoder reads its experts, as given."""

    ram: str | None = None
    guess: int = 0
    throttle: str | None = None
    readers: int = 2
    io: str = "direct"
    pack: Path | None = None
    experts: str | None = None
    floor: bool = False
    reroute: str | None = None

    def settings(self, again: Again) -> Settings:
        """Raises UsageError."""
        throttles = throttles_of(self.throttle, again)
        if len(throttles) > 1:
            raise UsageError(
                f"remoe eval measures one --throttle, not {self.throttle!r}; a sweep is remoe decode's.",
                again(throttle="1GB/s"),
            )
        check_form(self.pack, self.experts, again)
        settings = settings_of(self.ram, self.guess, self.readers, self.io, again)
        return replace(settings, throttle=throttles[0])

    def check_measured(self, measured: bool) -> None:
        """Raises UsageError where an option is given for a decoder that is left out."""
        if not measured and (given := self.given()):
            raise UsageError(
                f"--{next(iter(given))} is of the timed decoder, which --no-measure leaves out.",
                command("eval", no_measure=True),
            )

    def given(self) -> dict[str, Any]:
        """Those that are not as by default."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}


AS_IS = Measuring()


def plan_of(asked: Asked, model: str) -> Plan:
    """Raises UsageError or CacheError for a value that no model can be decoded with; nothing is loaded for it."""

    def again(**changes: Any) -> str:
        return asked.command(model, **changes)

    if asked.admission not in ADMISSIONS:
        raise UsageError(f"--admission is {' or '.join(ADMISSIONS)}, not {asked.admission!r}.", again(admission=None))
    if asked.warm not in WARMS:
        raise UsageError(f"--warm is {', '.join(WARMS[:-1])} or {WARMS[-1]}, not {asked.warm!r}.", again(warm=None))
    check_form(asked.pack, asked.experts, again)
    if asked.floor and asked.warm == "carry":
        raise UsageError("--floor empties the cache that --warm carry keeps: take one.", again(warm=None))
    if asked.prompt is not None and asked.prompts is not None:
        raise UsageError("--prompt gives one text, --prompts a source of them: take one.", again(prompt=None))
    if asked.requests is not None and asked.prompts is None:
        raise UsageError("--requests counts those of --prompts.", again(requests=None))
    for name in ("requests", "context"):
        value = getattr(asked, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} is at least 1, not {value}.", again(**{name: None}))
    batches = whole_numbers("batch", asked.batch, again)
    if asked.forced and (asked.prompts is None or asked.context is None):
        raise UsageError(
            "--forced goes on with the texts' own tokens: it needs --prompts, and --context for where they are cut.",
            again(prompt=None, prompts=asked.prompts or "demo", context=asked.context or 32),
        )
    if asked.forced and (
        sampled := [n for n in ("temperature", "top_p", "top_k", "seed") if getattr(asked, n) is not None]
    ):
        raise UsageError("--forced chooses no token, so nothing is drawn.", again(**dict.fromkeys(sampled)))
    check_sessions(asked, batches, again)
    check_heavy(asked, batches, again)
    if asked.in_place and asked.heavy is not None:
        raise UsageError("--in-place computes experts in one precision: it takes no --heavy.", again(heavy=None))
    if asked.beside_base and not asked.forced:
        raise UsageError("--beside-base compares the same tokens: it needs --forced.", again(forced=True))
    if asked.reroute is not None and batches[-1] > 1:
        raise UsageError("--reroute bends one token at a time: it takes no --batch.", again(batch=None))
    policy = choose(asked.policy).policy
    if why := unfit(policy, asked.admission, False):
        raise UsageError(f"--policy {asked.policy}: {why}.", again(admission="bypass"))
    if policy.refines and asked.guess:
        raise UsageError(
            f"--policy {asked.policy} reads ahead by its own scores: it takes no --guess.", again(guess=None)
        )
    if choose(asked.policy).prefetch is not None and (asked.guess or batches[-1] > 1 or asked.warm == "batch"):
        raise UsageError(
            f"--policy {asked.policy} lists experts token by token: it takes neither --batch, --warm batch nor --guess.",
            again(guess=None, batch=None, warm=None),
        )
    if {*SCORES} & {*policy.needs} and (batches[-1] > 1 or asked.warm == "batch"):
        raise UsageError(
            f"--policy {asked.policy} reads the routers' probabilities token by token: it takes neither --batch nor --warm batch.",
            again(policy=None),
        )
    return Plan(
        [] if asked.cache is None else whole_numbers("cache", asked.cache, again, least=None),
        whole_numbers("tokens", asked.tokens, again),
        batches,
        throttles_of(asked.throttle, again),
        replace(
            settings_of(
                asked.ram, asked.guess, asked.readers, asked.io, again, warm=asked.warm, in_place=asked.in_place
            ),
            heavy=asked.heavy,
        ),
        _sampling(asked, again),
    )


def check_heads(policy: str, kinds: Collection[str], again: Again) -> None:
    """kinds: of the heads that the delta brings. Raises UsageError where the policy needs others."""
    chosen = choose(policy).policy
    if lacking := [kind for kind in KINDS if kind in chosen.needs and kind not in kinds]:
        without = "gate_ahead" if chosen.refines else "retention"
        raise UsageError(
            f"--policy {policy} needs the {' and the '.join(lacking)} head: a --delta that has {'it' if len(lacking) == 1 else 'them'}. "
            f"{without} does without.",
            again(policy=without),
        )


def predictor_of(policy: str, path: Path | None, again: Again) -> Predictor | None:
    """What `remoe predictor train` wrote, for a policy whose prefetcher needs it. Raises UsageError, CacheError."""
    prefetch = choose(policy).prefetch
    needed = prefetch is not None and prefetch.kind.trained
    if path is None and needed:
        raise UsageError(
            f"--policy {policy} needs a --predictor, which remoe predictor train makes.", again(policy="lru")
        )
    if path is not None and not needed:
        raise UsageError(f"--policy {policy} reads no --predictor: lru+promoe does.", again(predictor=None))
    return None if path is None else Predictor.read(path)


def rule_of(text: str | None, top_k: int, n_experts: int, again: Again) -> Rule | None:
    """How choices are bent towards residents, METHOD:STRENGTH[:KEEP]. Raises UsageError."""
    if text is None:
        return None
    with instead(again(reroute="cache-prior:0.1"), UsageError):
        rule = Rule.parse(text, top_k)
        rule.check(top_k, n_experts)
    return rule


def check_for_model(plan: Plan, top_k: int, asked: Asked, model: str) -> None:
    """Raises CacheError or UsageError for what a model with K experts a token can't run."""
    for capacity in plan.capacities:
        if capacity < top_k:
            mended = sorted({top_k, *(c for c in plan.capacities if c > top_k)})
            raise CacheError(
                f"--cache {capacity} is too small for {model}: each token runs {top_k} experts a layer, so the decoder needs "
                "at least that.",
                asked.command(model, cache=",".join(map(str, mended))),
            )
    check_guess(plan.settings.guess, top_k, lambda **changes: asked.command(model, **changes))


@contextmanager
def fitted(
    again: Again, capacities: Sequence[int], shorter: Callable[[int], dict[str, Any]] | None = None
) -> Iterator[None]:
    """Too little memory for a decoder is refused with the very command that was asked for, but for what has to be less.
    capacities: those asked for. shorter: options with so many tokens at most, of all requests that are decoded together."""
    try:
        yield
    except MemoryShortError as error:
        changes, where = dict(error.changes or {}), error.where
        if most := changes.get("cache"):
            changes["cache"] = ",".join(map(str, sorted({min(capacity, most) for capacity in capacities})))
        if error.tokens and shorter is not None:
            changes, where = {**changes, **shorter(error.tokens)}, ""
        raise MemoryShortError(error.message, again(**changes) + where) from None


def shorter_of(plan: Plan, longest: int) -> Callable[[int], dict[str, Any]]:
    """longest: tokens of the longest request, new ones included."""

    def shorter(fit: int) -> dict[str, Any]:
        if fit >= longest:
            fitting = [batch for batch in plan.batches if batch * longest <= fit] or [fit // longest]
            return {"batch": ",".join(map(str, fitting))}
        new = min(plan.tokens[-1], fit // 2)
        return {"batch": None, "tokens": new, "context": fit - new}

    return shorter


def check_guess(guess: int, top_k: int, again: Again) -> None:
    if guess > top_k:
        raise UsageError(
            f"--guess {guess} is more than the {top_k} experts that a token runs in a layer.", again(guess=top_k)
        )


def settings_of(
    ram: str | None,
    guess: int,
    readers: int,
    io: str,
    again: Again,
    *,
    warm: str = "cold",
    in_place: bool = False,
) -> Settings:
    """How the experts come in, without a throttle. Raises UsageError."""
    size = 0 if ram is None else parse_size(ram)
    if size is None:
        raise UsageError(
            f"--ram takes a size of at least 1 byte (B is bytes), such as 8GB or 512MiB, not {ram!r}.",
            again(ram="8GB"),
        )
    if guess < 0:
        raise UsageError(f"--guess is the number of experts to read ahead, 0 or more, not {guess}.", again(guess=None))
    if not 1 <= readers <= MOST_READERS:
        raise UsageError(f"--readers is 1 to {MOST_READERS}, not {readers}.", again(readers=None))
    if io not in IO:
        raise UsageError(f"--io is {' or '.join(IO)}, not {io!r}.", again(io=None))
    if in_place and not size:
        raise UsageError(
            "--in-place computes missing experts where the RAM tier holds them: it needs --ram.", again(ram="8GB")
        )
    return Settings(readers=readers, io=io, ram=size, guess=guess, warm=warm, in_place=in_place)


def throttles_of(text: str | None, again: Again) -> list[float | None]:
    """Bytes a second, in the order given, each once; None for `none` and where the option is not given."""
    if text is None:
        return [None]
    found: list[float | None] = []
    for word in (part.strip() for part in text.split(",")):
        rate = None if word == "none" else parse_rate(word)
        if rate is None and word != "none":
            raise UsageError(
                f"--throttle takes bytes a second, such as 1GB/s or 550MB/s, or none, not {word!r}.",
                again(throttle="1GB/s"),
            )
        found.append(rate)
    return list(dict.fromkeys(found))


def whole_numbers(name: str, text: str, again: Again, *, least: int | None = 1) -> list[int]:
    """ "1,2,4" in rising order, each once. least: None where a later check knows the least."""
    words = [part.strip() for part in text.split(",")]
    found = sorted({int(word) for word in words if _AMOUNT.fullmatch(word)})
    # without any that can be used: the default, and of --cache, which has none, a likely one
    good = ",".join(str(number) for number in found if number >= (least or 1)) or ("8" if name == "cache" else None)
    if not all(map(_AMOUNT.fullmatch, words)):
        raise UsageError(f"--{name} takes whole numbers such as 4 or 1,2,4, not {text!r}.", again(**{name: good}))
    if least is not None and found[0] < least:
        raise UsageError(f"--{name} is at least {least}, not {found[0]}.", again(**{name: good}))
    return found


def _sampling(asked: Asked, again: Again) -> Sampling | None:
    """None where no option asks to sample, and at temperature 0."""
    temperature, top_p, top_k = asked.temperature, asked.top_p, asked.top_k
    if temperature is not None and not 0 <= temperature < math.inf:
        raise UsageError(f"--temperature is 0 (greedy) or more, not {temperature}.", again(temperature=0.8))
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"--top-p is above 0 and at most 1, not {top_p}.", again(top_p=0.9))
    if top_k is not None and top_k < 1:
        raise UsageError(f"--top-k is at least 1, not {top_k}.", again(top_k=40))
    if asked.seed is not None and not 0 <= asked.seed < 2**63:
        raise UsageError(f"--seed is at least 0 and below 2^63, not {asked.seed}.", again(seed=None))
    if temperature is None and top_p is None and top_k is None:
        if asked.seed is not None:
            raise UsageError(
                "--seed draws the tokens of --temperature, --top-p or --top-k; greedy decoding draws none.",
                again(temperature=0.8),
            )
        return None
    if temperature == 0:
        if drawing := next((name for name in ("top_p", "top_k", "seed") if getattr(asked, name) is not None), None):
            raise UsageError(
                f"--temperature 0 is greedy, which draws nothing: --{drawing.replace('_', '-')} has no use there.",
                again(temperature=0.8),
            )
        return None
    return Sampling(1.0 if temperature is None else temperature, top_p or 1.0, top_k or 0, asked.seed or 0)
