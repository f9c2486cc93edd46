"""Loading models and mapping names between memory and disk: the only file that touches transformers' private APIs."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TYPE_CHECKING

import torch

from remoe_cli.environment import out_of_memory
from remoe_cli.errors import CheckpointError, FamilyError
from remoe_cli.families.base import decoder_layers, find_gates
from remoe_cli.families.experts import expert_layers, ExpertLayer, Merge, natural
from remoe_cli.families.held import Held, held_tensors
from remoe_cli.families.quantised import is_quantised, weights
from remoe_cli.families.stored import DTYPES, INTEGERS, Stored
from remoe_cli.hub.checkpoint import Checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def compute_dtype(checkpoint: Checkpoint, device: str, wanted: str = "auto") -> torch.dtype:
    """The recipe's dtype; "auto" is bfloat16 on a GPU and for quantised weights, else the checkpoint's own dtype."""
    if wanted != "auto":
        return getattr(torch, wanted)
    if device.startswith("cuda"):
        return torch.bfloat16
    if is_quantised(checkpoint):
        return torch.bfloat16
    largest = max(checkpoint.tensors.values(), key=lambda info: info.nbytes)
    return DTYPES.get(largest.dtype, torch.float32)


def load_resident(checkpoint: Checkpoint, dtype: torch.dtype, device: str) -> "PreTrainedModel":
    """The whole model in memory, in eval mode, from its own native class (remote code is never run), all of it in `dtype`.

    Raises CheckpointError when tensors that the model needs are not in the checkpoint.
    """
    from transformers import AutoModelForCausalLM

    if is_quantised(checkpoint):
        model = meta_model(checkpoint, dtype)
        model = _filled(model, checkpoint, renamed(model, checkpoint), dtype, device)
        with suppress(ValueError, ImportError):  # as from_pretrained does it, where the class takes it
            model.set_experts_implementation("grouped_mm")
        return model
    with _loading(checkpoint):
        model, info = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder, dtype=dtype, trust_remote_code=False, local_files_only=True, output_loading_info=True
        )
    require_no_missing(checkpoint, info["missing_keys"])
    return model.to(device).eval()


def load_expert_parallel(checkpoint: Checkpoint, dtype: torch.dtype, processes: int) -> "PreTrainedModel":
    """Each process of the default group holds its share of the experts, to which tokens travel, and of everything else, by transformers'
    DistributedConfig; in eval mode. Raises CheckpointError where transformers can't."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    with _loading(checkpoint):
        config = DistributedConfig(fsdp_size=processes, ep_size=processes)
        model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=dtype, distributed_config=config)
    return model.eval()


@contextmanager
def quiet() -> Iterator[None]:
    """Silences transformers' own reports and bars (tables of tensors on stderr): what goes wrong is one line of ours."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _loading(checkpoint: Checkpoint) -> Iterator[None]:
    """Quiet, and one line for what transformers raises, which may be any kind of error."""
    try:
        with quiet():
            yield
    except Exception as error:
        if out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}"[:300]
        hint = f"cat {checkpoint.folder}/config.json, or pip install -U transformers"
        raise CheckpointError(f"{checkpoint.id} cannot be loaded ({reason}).", hint) from error


def kept_cache(out) -> dict:
    """The attention cache of a model's output, as the keyword of its next pass (renamed in transformers 5.24)."""
    name = "cache" if "cache" in out else "past_key_values"
    return {name: out[name]}


def require_no_missing(checkpoint: Checkpoint, missing) -> None:
    """Raises CheckpointError that names a tensor which the model needs and the checkpoint lacks."""
    if missing:
        raise CheckpointError(
            f"{checkpoint.id} lacks {len(missing)} tensors that the model needs, such as {sorted(missing)[0]}.",
            "copy or download the model again",
        )


def renamed(model: "PreTrainedModel", checkpoint: Checkpoint) -> dict[str, tuple[str, str | None]]:
    """On-disk name -> (in-memory name, source pattern of the converter that merges it or None), by the loader's own rules."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import rename_source_key, WeightConverter, WeightRenaming

    rules = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    state = model.state_dict()
    prefix = model.base_model_prefix
    found = {key: rename_source_key(key, renamings, converters, prefix, state) for key in weights(checkpoint)}
    # a rule that leads nowhere is none (deepseek_v4's final norm)
    return {key: (key, None) if to[0] not in state and key in state else to for key, to in found.items()}


def gate_disk_names(model: "PreTrainedModel", checkpoint: Checkpoint) -> dict[str, str]:
    """In-memory gate parameter -> on-disk name: the loader's renaming, inverted, must agree with the family's row. Selection
    biases come too, which a delta may hold beside gates.

    Raises FamilyError where they disagree, where a gate is not on disk, or where it is stored quantised.
    """
    on_disk = {memory: disk for disk, (memory, _) in renamed(model, checkpoint).items()}
    names = {}
    for gate in find_gates(model):
        family = gate.family
        for memory, tensor in zip(gate.names, family.tensors, strict=True):
            disk, expected = on_disk.get(memory), family.disk_name(gate.layer, tensor)
            if disk is None or not f".{disk}".endswith(f".{expected}"):
                raise FamilyError(
                    f"{family.model_type}: the gate {memory} should be {expected} on disk, the loader reads {disk}.",
                    "pip install -U remoe-cli transformers",
                )
            if checkpoint.tensors[disk].dtype not in DTYPES:
                raise FamilyError(
                    f"the gate {disk} is stored as {checkpoint.tensors[disk].dtype}; a gate must be BF16, F16 or F32.",
                    f"remoe finetune a bf16 copy of {checkpoint.id}",
                )
            names[memory] = disk
        if gate.bias in on_disk:
            names[gate.bias] = on_disk[gate.bias]
    return names


def disk_names(model: "PreTrainedModel", checkpoint: Checkpoint) -> dict[str, str]:
    """In-memory -> on-disk name of every tensor that is stored as it is in memory; experts that the loader merges are not."""
    found = renamed(model, checkpoint)
    return {memory: disk for disk, (memory, merged) in found.items() if merged is None}


def router_names(checkpoint: Checkpoint) -> dict[str, str]:
    """On-disk -> in-memory name of every tensor of the modules that own a gate, gates and buffers alike, from the headers alone.

    Raises as `gate_disk_names`.
    """
    model = meta_model(checkpoint, torch.float32)
    modules = {name.rpartition(".")[0] for gate in find_gates(model) for name in gate.names}
    found = disk_names(model, checkpoint) | gate_disk_names(model, checkpoint)
    return {disk: memory for memory, disk in found.items() if memory.rpartition(".")[0] in modules}


def on_disk(
    model: "PreTrainedModel", checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """In-memory name -> tensor as on-disk name -> tensor, what the loader merges taken apart again (all of a merge must be
    there). Raises FamilyError where a name or shape is not the checkpoint's."""
    from transformers.core_model_loading import revert_weight_conversion

    found = revert_weight_conversion(model, tensors) if tensors else {}
    for name, tensor in found.items():
        info = checkpoint.tensors.get(name)
        if info is None or info.shape != tuple(tensor.shape):
            raise FamilyError(
                f"{checkpoint.id} stores no {name} of {list(tensor.shape)}.", "--set train.scope=gates+heads"
            )
    return found


def in_memory(
    model: "PreTrainedModel", checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The inverse of `on_disk`: experts are merged as the loader does it, into new tensors. Every name is one of the
    checkpoint's. Raises FamilyError where only a part of a merge is there."""
    names = renamed(model, checkpoint)
    found: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[str, list[torch.Tensor]]] = {}
    for disk in sorted(tensors, key=natural):
        memory, pattern = names[disk]
        if pattern is None:
            found[memory] = tensors[disk]
        else:
            parts.setdefault(memory, {}).setdefault(pattern, []).append(tensors[disk])
    merges = _merges(model, checkpoint, names) if parts else {}
    for memory, by_pattern in parts.items():
        shape = model.get_parameter(memory).shape
        merge = merges.get(memory)
        if (
            merge is None
            or {*by_pattern} != {*merge.patterns}
            or any(len(of) != shape[0] for of in by_pattern.values())
        ):
            raise FamilyError(f"a part of {memory} is missing, so it cannot be put in.", "the delta of a whole run")
        found[memory] = torch.cat([torch.stack(by_pattern[pattern]) for pattern in merge.patterns], merge.dim + 1)
    return found


def load_without_experts(
    checkpoint: Checkpoint, dtype: torch.dtype, device: str = "cpu"
) -> tuple["PreTrainedModel", list[ExpertLayer]]:
    """The model in eval mode without its routed experts, which are neither read nor allocated, and where those lie.

    The stock experts modules stay, without their 3-D parameters; whoever serves the experts puts an object with
    `__getitem__(expert)` under each part's name. Experts run by the class's own eager code. Gates that the family
    keeps in fp32 are fp32. Raises FamilyError for a layout that cannot be read expert by expert, CheckpointError for
    missing or misshapen tensors.
    """
    model = meta_model(checkpoint, dtype)
    memory_names = renamed(model, checkpoint)
    merges = _merges(model, checkpoint, memory_names)
    layers = _expert_layers(model, checkpoint, memory_names, merges)
    for layer in layers:
        for part in layer.parts:
            delattr(layer.module, part.name)
        setattr(layer.module, "_is_hf_initialized", True)  # noqa: B010  else the loader initialises what is gone

    return _filled(model, checkpoint, memory_names, dtype, device), layers


def load_without_layers(
    checkpoint: Checkpoint, dtype: torch.dtype, device: str = "cpu"
) -> tuple["PreTrainedModel", list[list[Held]]]:
    """The model in eval mode without the frozen tensors of its decoder layers, which are neither read nor allocated, and
    where those lie, a list a layer. What is outside the layers is there, and every gate.

    In a held tensor's place is None; whoever brings a layer in sets it. Raises as `load_without_experts`.
    """
    model = meta_model(checkpoint, dtype)
    memory_names = renamed(model, checkpoint)
    gates = find_gates(model)
    lacking = None
    try:
        experts = _expert_layers(model, checkpoint, memory_names, _merges(model, checkpoint, memory_names))
    except FamilyError as error:  # no matter where all of them are one tensor (dbrx)
        experts, lacking = [], error
    places = weights(checkpoint)
    plain = {memory: places[disk] for disk, (memory, pattern) in memory_names.items() if pattern is None}
    for info in plain.values():
        if info.scales is None and info.dtype not in INTEGERS:
            _require_readable(checkpoint, info.dtype)
    held = held_tensors(model, gates, experts, plain, _dtypes(model, dtype))
    for layer, tensors in zip(decoder_layers(model, gates), held, strict=True):
        for tensor in tensors:
            owner, _, name = tensor.name.rpartition(".")
            module = layer.get_submodule(owner)
            (module._buffers if tensor.buffer else module._parameters)[name] = None
        for module in layer.modules():
            if not module._non_persistent_buffers_set:
                setattr(module, "_is_hf_initialized", True)  # noqa: B010  else the loader initialises what is gone
    for gate in gates:
        if not hasattr(gate.experts, "num_experts"):  # it was told by the shape of what is gone
            gate.experts.num_experts = gate.n_experts  # type: ignore[assignment]
    if lacking and any(True for gate in gates for _ in gate.experts.parameters()):
        raise lacking
    return _filled(model, checkpoint, memory_names, dtype, device), held


def _dtypes(model: "PreTrainedModel", dtype: torch.dtype) -> dict[str, torch.dtype]:
    """In-memory name -> the dtype that the loader gives it, by its own plan."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype)
    pattern, groups, _ = build_glob_alternation(list(plan)) if plan else (None, {}, None)
    found = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        match = pattern.search(name) if pattern else None
        found[name] = plan[groups[match.lastgroup]] if match and match.lastgroup else tensor.dtype
    return found


def _filled(
    model: "PreTrainedModel",
    checkpoint: Checkpoint,
    memory_names: dict[str, tuple[str, str | None]],
    dtype: torch.dtype,
    device: str,
) -> "PreTrainedModel":
    """A meta model with all of its tensors that the checkpoint has, by the loader's own rules; in eval mode."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    places, names, stored = weights(checkpoint), set(model.state_dict()), {}
    for disk, (memory, _) in memory_names.items():
        if memory in names:
            info = places[disk]
            if info.scales is None and info.dtype not in INTEGERS:
                _require_readable(checkpoint, info.dtype)
            stored[disk] = Stored(info, dtype)
    with _loading(checkpoint):
        plan = LoadStateDictConfig(
            dtype=dtype,
            dtype_plan=model._get_dtype_plan(dtype),
            weight_mapping=get_model_conversion_mapping(model),
            device_map={"": torch.device(device)},
        )
        info, _ = type(model)._load_pretrained_model(model, stored, None, plan)
        info = type(model)._finalize_model_loading(model, plan, info)
    require_no_missing(checkpoint, info.missing_keys)
    return model.eval()


def experts_on_disk(checkpoint: Checkpoint) -> list[ExpertLayer]:
    """Where the routed experts lie, from the headers of the files alone. Raises as `load_without_experts`."""
    model = meta_model(checkpoint, torch.float32)
    memory_names = renamed(model, checkpoint)
    return _expert_layers(model, checkpoint, memory_names, _merges(model, checkpoint, memory_names))


def _expert_layers(
    model: "PreTrainedModel",
    checkpoint: Checkpoint,
    memory_names: dict[str, tuple[str, str | None]],
    merges: dict[str, Merge],
) -> list[ExpertLayer]:
    module_names = {id(module): name for name, module in model.named_modules()}
    layers = expert_layers(checkpoint, find_gates(model), module_names, memory_names, merges)
    for layer in layers:
        for piece in layer.pieces(0):
            if not piece.role:
                _require_readable(checkpoint, piece.dtype)
    return layers


def meta_model(checkpoint: Checkpoint, dtype: torch.dtype) -> "PreTrainedModel":
    """The stock class without any memory for weights, its experts run one by one by the class's own code."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils.generic import ContextManagers

    with _loading(checkpoint):
        config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False, local_files_only=True)
        cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        if cls.config_class is not type(config):
            config = config.get_text_config()
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # weights are given as what they stand for
        config.dtype = dtype
        config._experts_implementation = "eager"
        with ContextManagers(cls.get_init_context(dtype, False, False, False)):
            return cls(config)


def _merges(
    model: "PreTrainedModel", checkpoint: Checkpoint, memory_names: dict[str, tuple[str, str | None]]
) -> dict[str, Merge]:
    """For each in-memory expert parameter that the loader merges from several tensors, how.

    Raises FamilyError where the loader would do more than stack and concatenate whole experts.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    rules = get_model_conversion_mapping(model)
    converter_of = {p: rule for rule in rules if isinstance(rule, WeightConverter) for p in rule.source_patterns}
    experts = {id(gate.experts) for gate in find_gates(model)}
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if id(module) in experts)
    merges: dict[str, Merge] = {}
    for memory, pattern in set(memory_names.values()):
        if pattern is None or not memory.startswith(prefixes):
            continue
        converter = converter_of[pattern]
        stack, *joins = converter.operations
        stacked = isinstance(stack, MergeModulelist) and stack.dim == 0
        dims = [join.dim for join in joins if isinstance(join, Concatenate) and join.dim > 0]
        if not stacked or len(joins) > 1 or len(dims) != len(joins):
            names = ", ".join(type(operation).__name__ for operation in converter.operations)
            raise FamilyError(
                f"{checkpoint.id}: the loader builds {memory} with {names}; "
                "experts can be left on disk only where they are stacked and concatenated.",
                "pip install -U remoe-cli transformers",
            )
        merges[memory] = Merge(tuple(converter.source_patterns), dims[0] - 1 if dims else 0)
    return merges


def _require_readable(checkpoint: Checkpoint, dtype: str) -> None:
    if dtype not in DTYPES:
        raise FamilyError(
            f"{checkpoint.id} stores weights as {dtype}; remoe reads {', '.join(DTYPES)}.",
            f"remoe eval a bf16 copy of {checkpoint.id}",
        )
