"""What llama.cpp makes of a GGUF, through the registry package llama-cpp-python: logits, and which experts were chosen."""

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import llama_cpp
import torch

CHOSEN = b"ffn_moe_topk-"  # what llama.cpp calls the choice of a layer in its graph


class Said(NamedTuple):
    """logits_BTV in fp32. choice_BTK: layer -> the experts of each token, best first."""

    logits_BTV: torch.Tensor
    choice_BTK: dict[int, torch.Tensor]


class _Tensor(ctypes.Structure):
    """The first members of a ggml_tensor."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    ]


def run(file: Path, ids_BT: torch.Tensor) -> Said:
    """Every row in one batch of its own, in fp32 throughout: key-value cache too, no flash attention, one thread."""
    llama_cpp.llama_backend_init()
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, None)
    settings = llama_cpp.llama_model_default_params()
    settings.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), settings)
    assert model, f"llama.cpp does not load {file}"
    try:
        rows = [_row(model, ids) for ids in ids_BT.tolist()]
    finally:
        llama_cpp.llama_model_free(model)
    choices = {layer: torch.stack([row[1][layer] for row in rows]) for layer in sorted(rows[0][1])}
    return Said(torch.stack([row[0] for row in rows]), choices)


def _row(model, ids: list[int]) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    chosen: dict[int, torch.Tensor] = {}

    def seen(pointer: int, ask: bool, data: object) -> bool:
        name = ctypes.string_at(_ggml().ggml_get_name(pointer))
        if name.startswith(CHOSEN) and not ask:
            chosen[int(name[len(CHOSEN) :])] = _integers(pointer)
        return not ask or name.startswith(CHOSEN)

    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = len(ids) + 8, len(ids), len(ids)
    settings.n_threads = settings.n_threads_batch = 1
    settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
    settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.cb_eval = llama_cpp.ggml_backend_sched_eval_callback(seen)
    context = llama_cpp.llama_init_from_model(model, settings)
    assert context
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    try:
        batch.n_tokens = len(ids)
        for at, token in enumerate(ids):
            batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = (
                token,
                at,
                1,
                0,
                1,
            )
        assert llama_cpp.llama_decode(context, batch) == 0
        width = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        flat = ctypes.cast(llama_cpp.llama_get_logits(context), ctypes.POINTER(ctypes.c_float * (len(ids) * width)))
        return torch.frombuffer(flat.contents, dtype=torch.float32).reshape(len(ids), width).clone(), chosen
    finally:
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)


def _integers(pointer: int) -> torch.Tensor:
    """[T, K] of a tensor of 32-bit integers, which may be a view of wider rows."""
    tensor = _Tensor.from_address(pointer)
    columns, rows, stride = tensor.ne[0], tensor.ne[1], tensor.nb[1]
    row = (ctypes.c_int32 * columns)()
    found = []
    for number in range(rows):
        _ggml().ggml_backend_tensor_get(pointer, row, number * stride, 4 * columns)
        found.append(list(row))
    return torch.tensor(found)


@functools.cache
def _ggml() -> ctypes.CDLL:
    library = ctypes.CDLL(str(next(Path(llama_cpp.llama_cpp._base_path).glob("libggml-base.*"))))
    library.ggml_get_name.argtypes, library.ggml_get_name.restype = [ctypes.c_void_p], ctypes.c_void_p
    library.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    library.ggml_backend_tensor_get.restype = None
    return library
