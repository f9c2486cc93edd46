"""Attention over latents equals the stock module's, which expands them."""

import pytest
import torch
from tiny_models import make, MODEL_TYPES, VOCABULARY
from transformers import DynamicCache

from remoe_cli.families.loader import kept_cache, load_resident
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.offload.latent import absorb

TOLERANCE = 1e-5


def loaded(folder, dtype: torch.dtype = torch.float32, **settings):
    model = load_resident(Checkpoint.open(make("deepseek_v2", folder, dtype, **settings)), dtype, "cpu")
    model.set_experts_implementation("eager")
    return model


def restore(model) -> None:
    for module in model.modules():
        module.__dict__.pop("forward", None)


def logits(model, ids_BT: torch.Tensor, n_prompt: int, **first) -> torch.Tensor:
    """[B, T - n_prompt + 1, V]: of the prompt's last token, and of the others fed one by one."""
    with torch.inference_mode():
        out = model(input_ids=ids_BT[:, :n_prompt], use_cache=True, logits_to_keep=1, **first)
        kept = [out.logits]
        for token_B1 in ids_BT[:, n_prompt:].split(1, -1):
            if "attention_mask" in first:
                first["attention_mask"] = torch.cat((first["attention_mask"], torch.ones_like(token_B1)), -1)
            out = model(input_ids=token_B1, use_cache=True, **kept_cache(out), **first)
            kept.append(out.logits)
    return torch.cat(kept, 1)


@pytest.fixture
def ids_BT() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (3, 60), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("settings", [{}, {"q_lora_rank": 12}, {"v_head_dim": 16}], ids=str)
def test_logits_are_the_stock_models(tmp_path, ids_BT, settings):
    model = loaded(tmp_path, **settings)
    for n_prompt in (1, 40):
        stock = logits(model, ids_BT, n_prompt)
        absorb(model)
        ours = logits(model, ids_BT, n_prompt)
        assert (ours - stock).abs().max() <= TOLERANCE < 1e-4 * stock.std()
        restore(model)


def test_half_precision_loses_no_more_than_in_the_stock_module(tmp_path):
    """Of one attention module: over a whole model, a router's near-tie would hide what is lost."""
    model = loaded(tmp_path, torch.bfloat16, kv_lora_rank=64, qk_nope_head_dim=32, v_head_dim=32)
    x_BTH = torch.randn(3, 60, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()

    def attended(dtype: torch.dtype) -> torch.Tensor:
        module, rotary, cache, kept = model.model.layers[0].self_attn, model.model.rotary_emb, DynamicCache(), []
        with torch.inference_mode():
            for place_T in [torch.arange(40), *torch.arange(40, 60).split(1)]:
                x = x_BTH[:, place_T].to(dtype)
                kept.append(
                    module(
                        hidden_states=x, attention_mask=None, cache=cache,
                        position_embeddings=rotary(x, place_T[None]),
                    )[0].float()
                )  # fmt: skip
        return torch.cat(kept, 1)

    stock = attended(torch.bfloat16)
    absorb(model)
    ours = attended(torch.bfloat16)
    restore(model)
    model.float()
    exact = attended(torch.float32)
    lost = [
        ((half - exact)[:, part].square().mean().sqrt() / exact.std())
        for half in (stock, ours)
        for part in (slice(40), slice(40, 60))
    ]
    assert 0 < lost[2] <= 1.2 * lost[0] and 0 < lost[3] <= 1.2 * lost[1] < 0.02


def test_masked_tokens_are_not_attended_to(tmp_path, ids_BT):
    model = loaded(tmp_path)
    mask = torch.ones(3, 40, dtype=torch.long)
    mask[1, :7] = 0
    stock = logits(model, ids_BT, 40, attention_mask=mask)
    absorb(model)
    assert (logits(model, ids_BT, 40, attention_mask=mask) - stock).abs().max() <= TOLERANCE
    assert (logits(model, ids_BT, 40) - stock).abs().max() > 0.01


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_only_attention_that_caches_latents_is_changed(folders, family):
    model = load_resident(Checkpoint.open(folders(family)), torch.float32, "cpu")
    absorb(model)
    changed = [name for name, module in model.named_modules() if "forward" in module.__dict__]
    assert len(changed) == (3 if family == "deepseek_v2" else 0)


def test_a_step_expands_nothing(tmp_path, ids_BT, monkeypatch):
    model = loaded(tmp_path)
    absorb(model)
    expanded = []
    for layer in model.model.layers:
        stock = layer.self_attn.expand_kv
        monkeypatch.setattr(
            layer.self_attn, "expand_kv", lambda *a, stock=stock: expanded.append(a[0].shape[2]) or stock(*a)
        )
    logits(model, ids_BT, 50)
    assert expanded == [50] * 3
