from eqxshard.nn import flops_per_token


def test_operations_of_palm():
    # Table 3 of PaLM: 118 layers, 48 heads of 256 features, sequences of 2,048.
    flops = flops_per_token(
        parameters=540_000_000_000, layers=118, heads=48, head_dim=256, seq=2048
    )
    assert flops == 6 * 540_000_000_000 + 12 * 118 * 48 * 256 * 2048
    # "46.2 % with, and 45.7 % without attention."
    assert abs(flops / (6 * 540e9) - 46.2 / 45.7) < 0.002
