"""What training takes: bytes on the device and in host memory, traffic and arithmetic of a step, before anything is loaded.

All of it is arithmetic over the shapes of a model that was never given memory, and over the headers of its files. On a CPU
device and host memory are one pool.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from remoe_cli.errors import command, MemoryShortError
from remoe_cli.memory import first_that_fit
from remoe_cli.recipe import override, Recipe
from remoe_cli.sizes import show_size
from remoe_cli.train.scope import LAYERS_STAY
from remoe_cli.train.shape import Shape

RESIDENT, STREAMED, SHARDED = "resident", "streamed", "sharded"
WORKING_ROOM = 300_000_000  # bytes beside all that is counted: holes between allocations, temporaries, masks
# bytes for each element that learns: master, gradient and two moments (16), the newest state and the one before it (28),
# the base's value (4), temporaries of the update (8)
_LEARNT_BYTES = 56
_BUFFERS = 2  # layers that are on the device at once: the one that computes and the one that comes
_LOSS_BYTES = 32  # for each token, layer and expert: log P, its reference, both stacked, gradients
_TERM_BYTES = 12  # the same, for each distance at which tokens are compared: P and both differences
_FEWEST = 128  # tokens a row that a refusal offers
_WAITING_BYTES = 16  # the same, while a streamed step waits for its backward pass: logits, reference, gradients
_READING = 80_000_000  # bytes of the reads that are under way


class Needs(NamedTuple):
    """What one process takes. on_device, in_host: bytes by what they are for; loading: bytes of host memory
    while a resident or sharded model is loaded; ram: bytes of layers that stay in host memory; read, copied: bytes a step from files, and
    from the host (sharded: from the other devices) to the device; flops: of a step."""

    mode: str
    on_device: dict[str, int]
    in_host: dict[str, int]
    loading: int
    ram: int
    read: int
    copied: int
    flops: float

    @property
    def device(self) -> int:
        return sum(self.on_device.values())

    @property
    def host(self) -> int:
        """Where the device has a memory of its own."""
        return max(sum(self.in_host.values()), self.loading)

    @property
    def pool(self) -> int:
        """Bytes where device and host memory are one."""
        return max(self.device + sum(self.in_host.values()), self.loading)


def resident(shape: Shape, recipe: Recipe) -> Needs:
    """The whole model on the device."""
    rows = recipe.train.micro_batch * recipe.train.sequence
    full = recipe.train.scope == "full"
    on_device = {
        "weights": shape.weights,
        "gates and optimiser": _learning_bytes(shape, recipe),
        "activations": rows * _activations(shape, recipe),
        "logits": rows * _logit_bytes(shape, recipe),
        "router losses": rows * _loss_bytes(shape, recipe),
        "working room": WORKING_ROOM + shape.compiled,
    }
    loading = 2 * max(shape.layers)  # experts as they are stored, and as they are stacked
    passes = 1 if recipe.train.scope == "heads" else 2 + recipe.train.checkpointing + full
    return Needs(
        RESIDENT, on_device, {}, shape.weights + loading, 0, 0, 0, _flops(shape, recipe, passes + _teaches(recipe))
    )


def streamed(shape: Shape, recipe: Recipe, ram: int = 0) -> Needs:
    """Decoder layers come from files, or from the `ram` bytes of host memory in which as many as fit stay, first ones first.

    Raises MemoryShortError for a train.scope that trains the layers themselves, or a family whose layers need one another.
    """
    require_streamable(shape, recipe)
    if shape.entangled:
        raise MemoryShortError(
            f"{shape.model}: {shape.entangled}, so its layers cannot pass through memory one by one; it has to fit as a whole.",
            "the same command on a device with more memory, or on several",
        )
    rows = recipe.train.micro_batch * recipe.train.sequence
    step = rows * recipe.train.accumulation
    learns = recipe.train.scope != "heads"  # else the model's pass needs no gradient
    border = shape.hidden * shape.dtype.itemsize
    routers = shape.n_experts * (_WAITING_BYTES + 8 * len(recipe.heads)) + 16 * shape.top_k
    routers += border * (not learns)  # the heads' input
    on_device = {
        "weights outside the layers": shape.outside,
        "layers that pass": _BUFFERS * max(shape.layers),
        "gates and optimiser": _learning_bytes(shape, recipe),
        "activations": 2 * rows * (max(shape.kept) + shape.scores * recipe.train.sequence),
        "logits": rows * _logit_bytes(shape, recipe),
        "router losses": rows * _loss_bytes(shape, recipe),
        "router outputs of a step": step * shape.moe_layers * routers,
        "hidden states between layers": step * border * (1 + _teaches(recipe)),
        "working room": WORKING_ROOM + shape.compiled,
    }
    held = first_that_fit(shape.layers, ram)
    in_host = {
        "hidden states of a step": step * border * (len(shape.layers) - shape.lowest) * learns,
        "attention masks of a step": step * recipe.train.sequence,
        "reads under way": _READING,
    }
    if held:
        in_host["layers that stay"] = sum(shape.layers[i] for i in held)
    turns = [1 + (learns and i >= shape.lowest) for i in range(len(shape.layers))]  # back down to the lowest gate
    read = sum(n * size for i, (n, size) in enumerate(zip(turns, shape.stored)) if i not in held)
    copied = sum(n * size for n, size in zip(turns, shape.layers))
    return Needs(
        STREAMED,
        on_device,
        in_host,
        0,
        sum(shape.layers[i] for i in held),
        read,
        copied,
        _flops(shape, recipe, (3 if learns else 1) + _teaches(recipe)),
    )


def sharded(shape: Shape, recipe: Recipe, world: int) -> Needs:
    """One of `world` processes, a device each: every layer is spread over all and gathered when it computes.

    Raises MemoryShortError for a train.scope that trains the layers themselves.
    """
    require_streamable(shape, recipe)
    alone = resident(shape, recipe)
    gathered = _BUFFERS * max(shape.layers) + shape.outside
    on_device = {**alone.on_device, "weights": -(-shape.weights // world), "layers gathered": gathered}
    turns = 2 + recipe.train.checkpointing + _teaches(recipe)
    micro = -(-recipe.train.accumulation // world)
    copied = turns * micro * (shape.weights - shape.weights // world)
    return Needs(SHARDED, on_device, {}, 2 * max(shape.layers), 0, 0, copied, alone.flops / world)


def choose(
    shape: Shape, recipe: Recipe, device_free: int, host_free: int | None = None, ram: int | None = None
) -> Needs:
    """Resident where that fits, else streamed, with layers kept in what memory is left (in `ram` bytes, where given).

    device_free, host_free: bytes; host_free is None where both are one pool. Raises MemoryShortError, with the least that works,
    where neither fits.
    """
    whole = resident(shape, recipe)
    if fits(whole, device_free, host_free):
        return whole
    bare = streamed(shape, recipe)
    require_room(shape, recipe, bare, device_free, host_free)
    left = spare(bare, device_free, host_free)
    return streamed(shape, recipe, left if ram is None else min(left, ram))


def fits(needs: Needs, device_free: int, host_free: int | None = None) -> bool:
    """Into so many bytes; host_free is None where both are one pool."""
    if host_free is None:
        return needs.pool <= device_free
    return needs.device <= device_free and needs.host <= host_free


def spare(bare: Needs, device_free: int, host_free: int | None = None) -> int:
    """Bytes of host memory for layers, of what a streamed mode that keeps none leaves free."""
    return (device_free - bare.pool if host_free is None else host_free - bare.host) * 9 // 10


def that_fit(
    count: Callable[[Recipe], Needs], recipe: Recipe, device_free: int, host_free: int | None = None
) -> list[str] | None:
    """The least changes of the recipe ("section.key=value") with which a mode fits, None where none do. count: the mode's."""
    changes = _smaller(recipe, recompute=count(recipe).mode != STREAMED)
    return next((found for found in changes if fits(count(override(recipe, found)), device_free, host_free)), None)


def require_streamable(shape: Shape, recipe: Recipe) -> None:
    """Raises MemoryShortError where the recipe trains more than gates and heads."""
    if recipe.train.scope not in LAYERS_STAY:
        raise MemoryShortError(
            f"train.scope {recipe.train.scope} trains the layers of {shape.model} themselves, which then have to stay on the device; "
            f"{', '.join(LAYERS_STAY[:-1])} and {LAYERS_STAY[-1]} can be streamed or sharded.",
            command("finetune", shape.model, set="train.scope=gates"),
        )


def require_room(shape: Shape, recipe: Recipe, bare: Needs, device_free: int, host_free: int | None = None) -> None:
    """bare: streamed without layers that stay. Raises MemoryShortError, with the least that works, where it does not fit."""
    if not fits(bare, device_free, host_free):
        raise _short(shape, recipe, bare, device_free, host_free)


def _short(shape: Shape, recipe: Recipe, bare: Needs, device_free: int, host_free: int | None) -> MemoryShortError:
    """What is lacking, and the largest batch that fits, else the memory that the smallest takes."""
    need, free, parts, where = _lacking(bare, device_free, host_free)
    said = (
        f"{shape.model} streamed layer by layer needs {show_size(need)} of {where} "
        f"({', '.join(f'{name} {show_size(size)}' for name, size in parts.items())}), but {show_size(free)} are free"
    )
    if changes := that_fit(lambda less: streamed(shape, less), recipe, device_free, host_free):
        return MemoryShortError(f"{said}.", "the same command with" + "".join(f" --set {change}" for change in changes))
    *_, fewest = _smaller(recipe, recompute=False)
    need, _, _, where = _lacking(streamed(shape, override(recipe, fewest)), device_free, host_free)
    least = f"the least, rows of {min(recipe.train.sequence, _FEWEST)} tokens one by one, needs {show_size(need)}"
    return MemoryShortError(f"{said}; {least}.", f"the same command where {show_size(need)} of {where} are free")


def _lacking(needs: Needs, device_free: int, host_free: int | None) -> tuple[int, int, dict[str, int], str]:
    """Bytes that are needed and free, the first by what they are for, of the memory that is short."""
    if host_free is None:
        return needs.pool, device_free, {**needs.on_device, **needs.in_host}, "memory"
    if needs.device > device_free:
        return needs.device, device_free, needs.on_device, "the device's memory"
    return needs.host, host_free, {**needs.in_host, "loading": needs.loading}, "host memory"


def _smaller(recipe: Recipe, *, recompute: bool) -> Iterator[list[str]]:
    """Overrides, each needing less than the one before: the same tokens a step in rows one by one, recomputed activations, then
    shorter rows."""
    settings = recipe.train
    changes: list[str] = []
    if settings.micro_batch > 1:
        changes = ["train.micro_batch=1", f"train.accumulation={settings.micro_batch * settings.accumulation}"]
        yield changes
    if recompute and not settings.checkpointing:
        changes = [*changes, "train.checkpointing=true"]
        yield changes
    sequence = settings.sequence
    while sequence > _FEWEST:
        sequence = max(sequence // 2, _FEWEST)
        yield [*changes, f"train.sequence={sequence}"]
    yield [*changes, f"train.sequence={min(sequence, _FEWEST)}"]


def _learning(shape: Shape, recipe: Recipe) -> int:
    """Elements that the recipe's scope trains."""
    scope = recipe.train.scope
    if scope == "full":
        return shape.parameters
    heads = shape.gates * len(recipe.heads)
    adapters = shape.adapted * recipe.train.lora_rank * (scope == "gates+lora")
    return shape.gates * (scope != "heads") + heads + adapters


def _learning_bytes(shape: Shape, recipe: Recipe) -> int:
    """Of what learns, and of the gates in the model, in fp32 where the family keeps them so."""
    return _learning(shape, recipe) * _LEARNT_BYTES + 4 * shape.gates


def _teaches(recipe: Recipe) -> bool:
    return recipe.objective.target == "base"


def _activations(shape: Shape, recipe: Recipe) -> int:
    """Bytes a token of a resident model between its forward and its backward pass, and of one layer's backward."""
    pairs = shape.scores * recipe.train.sequence
    widest = max(shape.kept) + pairs
    if recipe.train.scope == "heads":
        return widest
    if recipe.train.checkpointing:
        return len(shape.layers) * shape.hidden * shape.dtype.itemsize + 2 * widest
    first = shape.lowest if recipe.train.scope == "gates" else 0
    return sum(kept + pairs for kept in shape.kept[first:]) * (1 + (recipe.train.scope == "full")) + widest


def _logit_bytes(shape: Shape, recipe: Recipe) -> int:
    """Bytes a token at the loss: logits and their gradient as computed; fp32 copy, log-probabilities and gradient."""
    a_value = 2 * shape.dtype.itemsize + 12 + (shape.dtype.itemsize + 16) * _teaches(recipe)
    return shape.vocabulary * a_value


def _loss_bytes(shape: Shape, recipe: Recipe) -> int:
    """Bytes a token of all that the objective keeps of the routers' logits."""
    distances = (3 + len(recipe.objective.lags)) * recipe.has_locality
    return shape.moe_layers * shape.n_experts * (_LOSS_BYTES + _TERM_BYTES * distances)


def _flops(shape: Shape, recipe: Recipe, passes: int) -> float:
    """2 for each weight that a token meets, once a pass; a backward pass makes no gradients of frozen weights."""
    tokens = recipe.train.micro_batch * recipe.train.accumulation * recipe.train.sequence
    return 2.0 * shape.active * passes * tokens
