"""Decoding and scoring with the Megatron model itself, straight from a training checkpoint.

from megatron_fbt.inference.native import load

with load("runs/demo/run", tensor_model_parallel_size=2) as model:   # on each of the two processes
    texts = generate(model, [[5, 17, 3], [9]], GenerationOptions("soft"))
    scores = score(model, [([5, 17], [3, 8])], "soft")
"""

from megatron_fbt.inference.native.decoding import Decoder, Generated, generate
from megatron_fbt.inference.native.model import NativeModel, load
from megatron_fbt.inference.native.scoring import Score, score

__all__ = ["Decoder", "Generated", "NativeModel", "Score", "generate", "load", "score"]
