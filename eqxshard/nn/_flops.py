"""The operations of a training step, to compare with what devices can do."""


def flops_per_token(
    *, parameters: int, layers: int, heads: int, head_dim: int, seq: int
) -> float:
    """The floating-point operations of training a decoder on a token.

    As in appendix B of PaLM (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311):
    6 for each parameter and 12 for each pair of features in a product of attention,
    forward and backward. What is computed again to save memory does not count, and causal
    attention counts as if all positions saw each other.

    **Arguments:**

    - `parameters`: those that each token is multiplied by, so not tables of the input; of
        experts, those that a token goes through.
    - `layers`, `heads`, `head_dim`: the sizes of attention; heads are those of queries.
    - `seq`: the length of a sequence, or of a window of attention if that is shorter.

    **Returns:**

    Operations per token, of which a multiplication and an addition are two.

    !!! Example

        ```python
        flops = eqxshard.nn.flops_per_token(
            parameters=124_000_000, layers=12, heads=12, head_dim=64, seq=1024
        )
        eqxshard.nn.mfu(tokens_per_second, flops)
        ```
    """
    return 6.0 * parameters + 12.0 * layers * heads * head_dim * seq
