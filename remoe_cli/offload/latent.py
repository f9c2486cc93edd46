"""DeepSeek-V2's attention over compressed keys and values, for few tokens and long contexts.

The stock module expands the keys and values of the whole context at every step, which at 2,048 tokens costs more than all else,
and its unequal head sizes take a kernel whose memory grows with the square of the prompt.

Shape letters: B requests, S tokens of a pass, T tokens of the context, A heads, D size of a query or key, V of a value, C of a latent,
R of a rotary part.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from remoe_cli.offload.compute import without_onednn


def absorb(model: nn.Module) -> None:
    """DeepSeek-V2's attention modules that cache latents (`expand_kv`) attend to these as they are; others, which turn their
    queries and keys otherwise, are left alone."""
    for module in model.modules():
        if type(module).__name__ == "DeepseekV2Attention" and hasattr(module, "expand_kv"):
            module.forward = partial(_attend, module)


def _attend(module: Any, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """As the stock module's forward, called as its decoder layer calls it."""
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb

    n_requests, n_tokens, _ = hidden_states.shape
    mask, cache = kwargs.get("attention_mask"), kwargs.get("cache", kwargs.get("past_key_values"))
    if module.q_lora_rank is None:
        query = module.q_proj(hidden_states)
    else:
        query = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden_states)))
    query_BASD = query.view(n_requests, n_tokens, -1, module.qk_head_dim).transpose(1, 2)
    latent, turned = module.kv_a_proj_with_mqa(hidden_states)[:, None].split(
        [module.kv_lora_rank, module.qk_rope_head_dim], -1
    )
    plain_BASN, turned_BASR = query_BASD.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    turned_BASR, turned_B1SR = apply_rotary_emb(turned_BASR, turned, kwargs["position_embeddings"])
    latent_B1TC, turned_B1TR = module.kv_a_layernorm(latent), turned_B1SR
    if cache is not None:
        latent_B1TC, turned_B1TR = cache.update(latent_B1TC, turned_B1TR, module.layer_idx)
    if n_tokens == 1:
        out_BSAV = _one(module, plain_BASN, turned_BASR, latent_B1TC, turned_B1TR, mask)
    else:
        query_BASD = torch.cat((plain_BASN, turned_BASR), -1)
        key_BATD, value_BATV = module.expand_kv(latent_B1TC, turned_B1TR)
        # of equal sizes, so that a kernel without a matrix [S, T] takes them
        value_BATD = F.pad(value_BATV, (0, max(0, module.qk_head_dim - module.v_head_dim)))
        out_BASD = F.scaled_dot_product_attention(
            query_BASD, key_BATD, value_BATD, mask, is_causal=mask is None, scale=module.scaling
        )
        out_BSAV = out_BASD[..., : module.v_head_dim].transpose(1, 2)
    return module.o_proj(out_BSAV.reshape(n_requests, n_tokens, -1)), None


def _one(
    module: Any,
    plain_BASN: torch.Tensor,
    turned_BASR: torch.Tensor,
    latent_B1TC: torch.Tensor,
    turned_B1TR: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """One token: its query goes to the latents' space instead of the context to the heads', and its value back. All heads read
    the same latents, so they are the rows of one query."""
    weight_AWC = module.kv_b_proj.weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, module.kv_lora_rank)
    to_key, to_value = weight_AWC.split([module.qk_nope_head_dim, module.v_head_dim], 1)
    query_BAC = torch.bmm(plain_BASN[:, :, 0].transpose(0, 1), to_key).transpose(0, 1)
    query_B1AD = torch.cat((query_BAC, turned_BASR[:, :, 0]), -1)[:, None]
    key_B1TD = torch.cat((latent_B1TC, turned_B1TR), -1)
    out_B1AD = F.scaled_dot_product_attention(query_B1AD, key_B1TD, key_B1TD, mask, scale=module.scaling)
    out_ABC = out_B1AD[:, 0, :, : module.kv_lora_rank].transpose(0, 1)
    with without_onednn(out_ABC):
        return torch.bmm(out_ABC, to_value.transpose(1, 2)).transpose(0, 1)[:, None]
