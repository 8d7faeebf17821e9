"""A classifier of token sequences, as in Equinox's example "bert".

Devlin et al. 2018, https://arxiv.org/abs/1810.04805.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class Layer(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norms: list[eqx.nn.LayerNorm]
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, config, key):
        keys = jax.random.split(key, 3)
        size, hidden = config["hidden_size"], config["intermediate_size"]
        biases = ("query", "key", "value", "output")
        self.attention = eqx.nn.MultiheadAttention(
            config["num_attention_heads"],
            size,
            **{f"use_{name}_bias": True for name in biases},
            dropout_p=config["attention_probs_dropout_prob"],
            key=keys[0],
        )
        self.norms = [eqx.nn.LayerNorm(size), eqx.nn.LayerNorm(size)]
        self.up = eqx.nn.Linear(size, hidden, key=keys[1])
        self.down = eqx.nn.Linear(hidden, size, key=keys[2])
        self.dropout = eqx.nn.Dropout(config["hidden_dropout_prob"])

    def __call__(
        self, x: Float[Array, "time size"], mask: Bool[Array, "time time"], inference, key
    ):
        options = {"inference": inference}
        keys = jax.random.split(key, 3)
        attended = self.attention(x, x, x, mask, key=keys[0], **options)
        x = x + self.dropout(attended, key=keys[1], **options)
        x = jax.vmap(self.norms[0])(x)
        hidden = jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))
        x = x + self.dropout(hidden, key=keys[2], **options)
        return jax.vmap(self.norms[1])(x)


class BertClassifier(eqx.Module):
    embeddings: dict[str, eqx.nn.Embedding]
    norm: eqx.nn.LayerNorm
    layers: list[Layer]
    pooler: eqx.nn.Linear
    head: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, config, num_classes, key):
        size = config["hidden_size"]
        counts = {
            "token": config["vocab_size"],
            "segment": config["type_vocab_size"],
            "position": config["max_position_embeddings"],
        }
        *keys, pooler_key, head_key = jax.random.split(key, 5 + config["num_hidden_layers"])
        self.embeddings = {
            name: eqx.nn.Embedding(count, size, key=key)
            for (name, count), key in zip(counts.items(), keys)
        }
        self.norm = eqx.nn.LayerNorm(size)
        self.layers = [Layer(config, key) for key in keys[3:]]
        self.pooler = eqx.nn.Linear(size, size, key=pooler_key)
        self.head = eqx.nn.Linear(size, num_classes, key=head_key)
        self.dropout = eqx.nn.Dropout(config["hidden_dropout_prob"])

    def __call__(self, inputs, enable_dropout, key):
        tokens, inference = inputs["token_ids"], not enable_dropout
        ids = {
            "token": tokens,
            "segment": inputs["segment_ids"],
            "position": jnp.arange(len(tokens)),
        }
        key1, key2, *keys = jax.random.split(key, 2 + len(self.layers))
        embedded = [jax.vmap(self.embeddings[name])(ids[name]) for name in ids]
        x = jax.vmap(self.norm)(embedded[0] + embedded[1] + embedded[2])
        x = self.dropout(x, inference=inference, key=key1)
        mask = (tokens != 0)[:, None] & (tokens != 0)
        for layer, key in zip(self.layers, keys):
            x = layer(x, mask, inference, key)
        pooled = self.dropout(jnp.tanh(self.pooler(x[0])), inference=inference, key=key2)
        return self.head(pooled)
