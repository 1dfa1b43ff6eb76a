"""Decoding and scoring with the Megatron model itself, straight from a training checkpoint.

    from megatron_fbt.inference.native.decoding import generate
    from megatron_fbt.inference.native.model import load
    from megatron_fbt.inference.native.scoring import score

    with load("runs/demo/run", tensor_model_parallel_size=2) as model:  # on each of the two processes
        texts = generate(model, [[5, 17, 3], [9]], GenerationOptions("soft"))
        scores = score(model, [([5, 17], [3, 8])], "soft")

`python -m megatron_fbt.inference.native --help` is the command.
"""
