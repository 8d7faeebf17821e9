"""Writes `golden/`: tiny models of `transformers`, and their outputs.

    python tests/recipes/make_gpt_golden.py

It needs torch and transformers; the tests that read these files do not.
"""

from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from safetensors.numpy import save_file

FOLDER = Path(__file__).parent / "golden"
TIME = 12
#: In each row, the lengths of its documents, and where there is padding.
ROWS = {
    "left": [[-12], [5, -7], [8, -4]],
    "right": [[-12], [-9, 3], [-5, 7]],
    "packed": [[-5, -4, -3], [-12], [-7, -3, 2]],
}
MODELS = {
    "gpt2": transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2, n_head=2, n_embd=16, n_inner=32, n_positions=16, vocab_size=32,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            attn_implementation="eager",
        )
    ),
    "llama": transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            hidden_size=24, intermediate_size=24, max_position_embeddings=512,
            vocab_size=32,
            # Of the three wavelengths one stays, one changes, and one is between them.
            rope_parameters={
                "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
            attn_implementation="eager",
        )
    ),
}  # fmt: skip


def make_rows(rows):
    """Segments, 0 where there is padding, and positions."""
    segments, positions = np.zeros((2, len(rows), TIME), np.int32)
    for row, lengths in enumerate(rows):
        ends = np.cumsum(np.abs(lengths))
        for number, (length, end) in enumerate(zip(lengths, ends), start=1):
            at = slice(end - abs(length), end)
            segments[row, at] = number if length < 0 else 0
            positions[row, at] = np.arange(abs(length)) if length < 0 else 0
    return segments, positions


def compute(model, name, rng):
    segments, positions = make_rows(ROWS[name])
    tokens = rng.integers(0, 32, segments.shape, dtype=np.int32)
    goes_on = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    labels = np.full(tokens.shape, -100)
    labels[:, 1:][goes_on] = tokens[:, 1:][goes_on]
    mask = torch.tensor(segments > 0)
    if name == "packed":
        same = segments[:, :, None] == segments[:, None, :]
        same = torch.tensor(same & np.tri(TIME, dtype=bool))[:, None]
        mask = torch.where(same, 0.0, torch.finfo(torch.float32).min)
    model.zero_grad()
    out = model(
        input_ids=torch.tensor(tokens, dtype=torch.long),
        attention_mask=mask,
        position_ids=torch.tensor(positions, dtype=torch.long),
        labels=torch.tensor(labels),
    )
    out.loss.backward()
    arrays = {"tokens": tokens, "segments": segments, "positions": positions}
    targets = np.full_like(tokens, -1)
    targets[:, :-1][goes_on] = tokens[:, 1:][goes_on]
    arrays["targets"] = targets
    arrays["logits"] = out.logits.detach().numpy()
    arrays["loss"] = out.loss.detach().numpy()
    for path, parameter in model.named_parameters():
        arrays[f"gradients.{path}"] = parameter.grad.numpy()
    return arrays


def main():
    for kind, model in MODELS.items():
        rng = np.random.default_rng(0)
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                noise = torch.tensor(rng.normal(size=parameter.shape)).float()
                is_norm = "norm" in path or ".ln_" in path
                mean = 1.0 if is_norm and path.endswith("weight") else 0.0
                parameter.copy_(mean + 0.3 * noise)
        folder = FOLDER / kind
        model.eval().save_pretrained(folder)
        (folder / "generation_config.json").unlink()
        for name in ROWS:
            save_file(compute(model, name, rng), FOLDER / f"{kind}-{name}.safetensors")


if __name__ == "__main__":
    main()
