"""What test_invariants.py asserts on, measured in one process."""

from typing import List, Optional

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fbt.core.parallel import Layout
from megatron_fbt.core.schedule import PassTotals, PassView, Recipe, run_passes
from megatron_fbt.core.stage import FBTStage
from megatron_fbt.data.batch import MicroBatch
from megatron_fbt.model.layers import rms_normalize
from tests.distributed.model_case import SEQUENCE, Built, Case, Grid, build, global_batch, start

VOCAB = 1004  # divisible by the padding: no padded rows
T = 12


class FixedRegion(Recipe):
    """Validation's recipe (no jitter, no prefix mix-in) with a plain prompt of a given length."""

    prompt = 1

    def fused(self, batch: MicroBatch, pass_number: int) -> torch.Tensor:
        """Fused from the end of the prompt on."""
        positions = torch.arange(batch.document_starts.size(1)).expand_as(batch.document_starts)
        return (positions >= self.prompt) & ~batch.document_starts


def row(tokens: torch.Tensor) -> MicroBatch:
    """[b, s] tokens as one micro-batch of one document a row."""
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    starts[:, 0] = True
    return MicroBatch(tokens, tokens.roll(-1, 1), torch.ones(tokens.shape), starts, torch.arange(len(tokens)))


def pass_states(built: Built, batch: MicroBatch, passes: int, recipe: Recipe) -> List[torch.Tensor]:
    """Top states [s, b, h] of each pass, by the pass views that training runs."""
    totals = PassTotals(passes, built.layout.device)
    weights = [1.0] * (passes + 1)  # never the last pass: every view returns its state
    states, received = [], None
    for index in range(passes):
        view = PassView(built.stage, index, weights, recipe, totals, built.stage.config)
        totals.nll = torch.zeros(passes + 1)
        view.set_input_tensor(received)
        received = view(batch)
        states.append(received)
    return states


def fusion_formula(stage: FBTStage, normed: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """What the stage's fusion variant normalises, of N(e) and h, by its weights' names in a checkpoint."""
    weights = {name: param for name, param in stage.global_parameters().items() if name.startswith("fusion.")}

    def times(x: torch.Tensor, matrix: str) -> torch.Tensor:
        return x @ weights.pop(f"fusion.{matrix}.weight").t()

    if "fusion.concat_state_proj.weight" in weights:
        state = rms_normalize(state, stage.config.layernorm_epsilon)
        mixed = times(state, "concat_state_proj") + times(normed, "concat_token_proj")
    elif "fusion.token_proj.weight" in weights:
        mixed = times(state, "state_proj") + times(normed, "token_proj")
    else:
        mixed = times(state, "state_proj") * torch.sigmoid(times(normed, "token_gate"))
    assert not weights
    return mixed


@torch.no_grad()
def recurrence(stage: FBTStage, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """Top states of the token-by-token recurrence, without a cache: [s, b, h]."""
    inputs: Optional[torch.Tensor] = None
    states: List[torch.Tensor] = []
    for t in range(tokens.size(1)):
        embedded = stage.embed(tokens[:, t : t + 1])
        normed = rms_normalize(embedded, stage.config.layernorm_epsilon)
        u = normed if stage.input_norm == "rms" else embedded
        if t >= prompt:
            mixed = fusion_formula(stage, normed, states[-1])
            u = rms_normalize(mixed, stage.config.layernorm_epsilon) * stage.fusion.input_scale
        inputs = u if inputs is None else torch.cat([inputs, u])
        states.append(stage.run_layers(inputs, row(tokens[:, : t + 1]).document_starts)[-1:])
    return torch.cat(states)


@torch.no_grad()
def triangularity(built: Built, prompt: int) -> dict:
    """Largest difference in logits between k passes and the recurrence, over positions that must be final."""
    stage = built.stage.eval()
    tokens = torch.randint(0, VOCAB, (2, T), generator=torch.Generator().manual_seed(5))
    recipe = FixedRegion(built.config.feedback, 1, training=False)
    recipe.prompt = prompt
    truth = stage.logits(recurrence(stage, tokens, prompt))
    found = [stage.logits(states) for states in pass_states(built, row(tokens), T, recipe)]
    error = [(logits - truth).abs() for logits in found]
    return {
        "all positions after T passes": error[-1].max().item(),
        "final positions": max(error[k - 1][: prompt + k - 1].max().item() for k in range(1, T + 1)),
        "not final after one pass": error[0][prompt:].max().item(),
    }


def stock_gpt(built: Built) -> GPTModel:
    """Megatron-Core's own GPTModel with its own layers and the stage's weights."""
    stage = built.stage
    model = GPTModel(
        stage.config,
        get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=built.config.model.qk_layernorm),
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=stage.share_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=built.config.model.rotary_base,
    )
    own = dict(stage.named_parameters())
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(own[name])
    return model


def against_stock(built: Built) -> dict:
    """Loss and gradients of one pass against the stock model's on the same batch."""
    stage, batch = built.stage.train(), global_batch(0, VOCAB)[0]
    built.optimizer.zero_grad()
    for param in stage.parameters():
        param.grad = None
    totals = PassTotals(1, built.layout.device)
    loss = PassView(stage, 0, [1.0], built.recipe, totals, stage.config)(batch)
    loss.backward()
    ours = {name: param.main_grad.clone() for name, param in stage.named_parameters()}
    model = stock_gpt(built)
    embedded = None
    if stage.input_norm == "rms":
        embedded = rms_normalize(model.embedding(batch.tokens, None), stage.config.layernorm_epsilon)
    future = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    losses = model(batch.tokens, None, future, decoder_input=embedded, labels=batch.labels)
    stock = (losses * batch.loss_mask).sum()
    stock.backward()
    gradients = {
        name: ((ours[name] - param.grad).norm() / param.grad.norm()).item() for name, param in model.named_parameters()
    }
    return {
        "loss": abs(loss.item() - stock.item()) / stock.item(),
        "gradient": max(gradients.values()),
        "compared": len(gradients),
        "parameters": len(ours),
        "own head": "output_layer.weight" in gradients,
    }


@torch.no_grad()
def empty_region(built: Built) -> List[torch.Tensor]:
    """Losses of three passes when every position is a document start."""
    batch = global_batch(0, VOCAB)[0]
    batch.document_starts = torch.ones_like(batch.document_starts)
    states = pass_states(built, batch, 3, built.recipe)
    return [built.stage.losses(s, batch.labels) for s in states]


def state_gradient(built: Built) -> dict:
    """Gradient of pass 2's loss with respect to the states of pass 1, and by finite differences along it."""
    batch, stage = global_batch(0, VOCAB)[0], built.stage
    totals = PassTotals(2, built.layout.device)
    weights = [0.0, 1.0]
    first, second = (PassView(stage, k, weights, built.recipe, totals, stage.config) for k in range(2))
    states = first(batch)
    states.retain_grad()
    second.set_input_tensor(states)
    second(batch).backward()
    gradient = states.grad
    direction = gradient / gradient.norm()

    def loss_at(step: float) -> float:
        second.set_input_tensor(states.detach() + step * direction)
        return second(batch).item()

    with torch.no_grad():
        slope = (loss_at(0.05) - loss_at(-0.05)) / 0.1
    return {"norm": gradient.norm().item(), "slope": slope}


@torch.no_grad()
def causality(built: Built) -> dict:
    """Largest change in the logits before and from a changed token on, in each of three passes."""
    batch = global_batch(0, VOCAB)[0]
    batch.document_starts[:, 1:] = False
    before = pass_states(built, batch, 3, built.recipe)
    batch.tokens[:, 20] = (batch.tokens[:, 20] + 1) % VOCAB
    after = pass_states(built, batch, 3, built.recipe)
    change = [(a - b).abs().amax(dim=(1, 2)) for a, b in zip(after, before)]
    return {"earlier": [c[:20].max().item() for c in change], "later": [c[20:].max().item() for c in change]}


@torch.no_grad()
def documents(built: Built) -> dict:
    """Largest change in the logits of a row's documents in three passes, after a token of the first was changed."""
    batch, cut = global_batch(0, VOCAB)[0], 13
    batch.document_starts[:, 1:] = False
    batch.document_starts[:, cut] = True
    before = pass_states(built, batch, 3, built.recipe)
    batch.tokens[:, 2] = (batch.tokens[:, 2] + 1) % VOCAB
    after = pass_states(built, batch, 3, built.recipe)
    change = [(a - b).abs().amax(dim=(1, 2)) for a, b in zip(after, before)]
    return {"first": [c[2:cut].max().item() for c in change], "second": [c[cut:].max().item() for c in change]}


class HostReads(TorchDispatchMode):
    """Counts the reads of a tensor's value by the host (`item`, `bool`, …), each of which waits for a GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return function(*args, **(kwargs or {}))


def host_reads(built: Built) -> dict:
    """Host reads in a three-pass step, Adam's own update left out, and the lists that are fetched."""
    fetched = []
    plain_list, built.optimizer.megatron.step_with_ready_grads = torch.Tensor.tolist, lambda: True
    torch.Tensor.tolist = lambda tensor: fetched.append(tensor.shape) or plain_list(tensor)
    try:
        batches = global_batch(0, VOCAB)
        with HostReads() as reads:
            built.optimizer.zero_grad()
            totals = run_passes(built.stage, batches, 3, built.recipe)
            built.optimizer.step(totals, True, False)
    finally:
        torch.Tensor.tolist = plain_list
    return {"reads": reads.count, "lists": len(fetched)}


OPTIONS = {
    "model.attention_output_gate": True,
    "model.sliding_window": 5,
    "model.window_attn_skip_freq": 3,
}
MODELS = {
    "tied": {},
    "untied": {"model.share_embeddings_and_output_weights": False},
    "concat": {"feedback.fusion": "concat", "model.residual_multiplier": 0.7, **OPTIONS},
    "add": {"feedback.fusion": "add"},
}


def measure(rank: int, world_size: int) -> dict:
    """Everything, for each of MODELS; the function that the test process starts with."""
    layout: Layout = start(Grid())
    found = {}
    for name, fields in MODELS.items():

        def model(fields=fields, **more) -> Built:
            return build(Case("", {"model.vocab_size": VOCAB, **fields, **more}), Grid(), layout)

        found[name] = {
            "prompt 1": triangularity(model(), prompt=1),
            "prompt 5": triangularity(model(), prompt=5),
            "empty": empty_region(model()),
            "state gradient": state_gradient(model()),
            "causality": causality(model()),
            "documents": documents(model(**{"data.reset_attention_mask": True})),
            "documents seen": documents(model()),
        }
        if name in ("tied", "untied"):
            plain = {"model.input_norm": "none", "model.qk_layernorm": True}
            found[name]["rms"] = against_stock(model())
            found[name]["none"] = against_stock(model(**plain))
            found[name]["options"] = against_stock(model(**plain, **OPTIONS))
            found[name]["host"] = host_reads(model())
    return found
