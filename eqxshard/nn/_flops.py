"""The operations of a training step, to compare with the peak of devices."""


def flops_per_token(
    *, parameters: int, layers: int, heads: int, head_dim: int, seq: int
) -> float:
    """The floating-point operations of training a decoder on a token.

    As in appendix B of PaLM (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311): 6
    for each parameter, and in each layer 12 for each feature of the queries and each
    position of the sequence, for the forward and the backward pass. Operations that are
    repeated to save memory do not count, and causal attention counts as if all positions
    saw each other.

    **Arguments:**

    - `parameters`: the number of parameters that a token is multiplied with. Embedding
        tables of the input do not count, and of experts only those that a token goes
        through.
    - `layers`, `heads`, `head_dim`: the sizes of attention; heads are those of queries.
    - `seq`: the length of a sequence, or of a window of attention if that is shorter.

    **Returns:**

    Operations per token, where a multiplication and an addition count as two.

    !!! Example

        ```python
        flops = eqxshard.nn.flops_per_token(
            parameters=124_000_000, layers=12, heads=12, head_dim=64, seq=1024
        )
        eqxshard.nn.mfu(tokens_per_second, flops)
        ```
    """
    return 6.0 * parameters + 12.0 * layers * heads * head_dim * seq
