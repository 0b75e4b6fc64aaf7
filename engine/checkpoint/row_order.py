"""Which stored row each row of queries, keys and values is, where a checkpoint keeps them in another order."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.checkpoint.families.latent import Latent
from engine.checkpoint.model_config import DecoderConfig


def qkv_order(config: DecoderConfig) -> Tensor:
    """By output of ``LayerWeights.qkv``: the number of the stored output, int64.

    Products of queries and keys do not change when the values of both are moved alike: pairs that lie beside each
    other can be turned as halves.
    """
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    stored = torch.arange((heads + 2 * kv_heads) * head_dim)
    if config.names.grouped:
        groups = stored.view(kv_heads, heads // kv_heads + 2, head_dim)
        query, key, value = groups[:, :-2].reshape(-1), groups[:, -2].reshape(-1), groups[:, -1].reshape(-1)
    else:
        query, key, value = torch.split(stored, [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim])
    if config.names.interleaved:
        query, key = query[turned_order(config, heads)], key[turned_order(config, kv_heads)]
    return torch.cat([query, key, value])


def turned_order(config: DecoderConfig, heads: int) -> Tensor:
    """The same for the values of so many heads: those that are turned, halves in place of neighbours, then the rest."""
    turned = config.rotary.rotary_dim if config.rotary else 0
    values = torch.arange(heads * config.head_dim).view(heads, config.head_dim)
    halves = values[:, :turned].view(heads, -1, 2).transpose(1, 2).flatten(1)
    return torch.cat([halves, values[:, turned:]], 1).flatten()


def latent_orders(latent: Latent, heads: int) -> tuple[Tensor, Tensor]:
    """By row of the queries, and by value of a token's row: the number of the stored one. Turned values are first."""
    halves = torch.arange(latent.turned).view(-1, 2).t().flatten()
    head = torch.cat([latent.plain + halves, torch.arange(latent.plain)])
    query = (torch.arange(heads)[:, None] * latent.query + head).flatten()
    return query, torch.cat([latent.rank + halves, torch.arange(latent.rank)])
