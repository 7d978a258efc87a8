"""An EAGLE-3 head in torch, and its loss by training-time test.

Owns: the network, its start from the target's own weights, the steps of training-time test, and the losses.  Does not know: where
states come from, or how parameters are moved.

The network is that of EAGLE-3 (Li et al., 2503.01840, section 3): a pair (states of token i-1, embedding of token i) predicts token
i+1; what leaves the layer stands in for the next states.  At step s of training-time test each row is s tokens on, its states are
its own output of the step before, and it attends to the true pairs up to its own and to its own later ones, as a draft does.

Shapes: N pairs of all texts of a batch, R of them predict a token of an answer; d, H, G, D as in ``ops``; V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from foredraft.architecture import Architecture

LOSSES = ("ce", "tv", "lk")
# Of 2602.23881: how fast the loss goes over from cross-entropy to acceptance as that grows.
LK_RATE = 3.0
FUSION_STD = 0.002
BLOCK_ROWS, CHUNK_ROWS = 2048, 64


@dataclass(frozen=True)
class TextRows:
    """Where one text of a batch lies: its pairs start..stop, and its rows first..last among those that predict.

    Its predicting pairs are its last ``last - first``.
    """

    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True)
class TextBatch:
    """Texts side by side.

    ``tokens`` int64 [N]; ``features`` [N, 3d], of the token before; ``positions`` int64 [N]; ``rows`` int64 [R], the predicting
    pairs; ``label`` int64 [R], the token that followed, in the draft vocabulary, -1 when it is not in it; ``target`` [R, V'], the
    target's logits; ``texts`` where each text lies.
    """

    tokens: Tensor
    features: Tensor
    positions: Tensor
    rows: Tensor
    label: Tensor
    target: Tensor
    texts: Sequence[TextRows]


class StepResult(NamedTuple):
    """Of one step: how many rows it had, their mean loss, and the share that guessed the recorded token."""

    num_rows: int
    loss: float
    right: float


class Eagle3Network(nn.Module):
    """The head; parameters are named as in the speculators format, embeddings are the target's and frozen.

    ``feature_scale`` [3d] divides the states on their way in, so that large and small channels learn alike; saved weights have it
    multiplied in.
    """

    embed: Tensor
    feature_scale: Tensor
    draft_vocab: Tensor
    frequencies: Tensor

    def __init__(
        self, architecture: Architecture, num_taps: int, draft_vocab: Tensor, embed: Tensor, feature_scale: Tensor
    ) -> None:
        super().__init__()
        a = architecture
        d, self.head_dim = a.hidden_size, a.head_dim
        self.num_heads, self.num_kv_heads, self.eps = a.num_heads, a.num_kv_heads, a.rms_norm_eps
        self.scale, self.embedding_scale = a.head_dim**-0.5, 1.0
        q, kv, f = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.intermediate_size

        def matrix(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(rows, columns))

        self.fc = matrix(d, num_taps * d)
        self.qkv = matrix(q + 2 * kv, 2 * d)
        self.o = matrix(d, q)
        self.gate_up = matrix(2 * f, d)
        self.down = matrix(d, f)
        self.lm_head = matrix(len(draft_vocab), d)
        self.input_norm, self.hidden_norm, self.mlp_norm, self.norm = (nn.Parameter(torch.ones(d)) for _ in range(4))
        self.register_buffer("embed", embed, persistent=False)
        self.register_buffer("feature_scale", feature_scale)
        self.register_buffer("draft_vocab", draft_vocab)
        frequencies = torch.from_numpy(a.layers[-1].rope.inverse_frequencies(a.head_dim))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def start_from(self, weights: Mapping[str, Tensor], layer: int, generator: torch.Generator) -> None:
        """Take over the target's decoder layer, final norm and output head; ``weights`` have canonical names.

        The feature begins as the last of the states, and a little of all.
        """
        d, prefix = self.fc.shape[0], f"layers.{layer}."
        with torch.no_grad():
            self.fc.copy_(torch.randn(self.fc.shape, generator=generator) * FUSION_STD)
            self.fc[:, -d:] += torch.diag(self.feature_scale[-d:])
            qkv = weights[prefix + "qkv"]
            self.qkv[:, d:] = qkv
            self.qkv[:, :d] = weights["layers.0.qkv"]
            self.o.copy_(weights[prefix + "o"])
            self.gate_up.copy_(weights[prefix + "gate_up"])
            self.down.copy_(weights[prefix + "down"])
            self.lm_head.copy_(weights.get("lm_head", weights["embed"])[self.draft_vocab])
            self.input_norm.copy_(weights["layers.0.attn_norm"])
            self.hidden_norm.copy_(weights[prefix + "attn_norm"])
            self.mlp_norm.copy_(weights[prefix + "mlp_norm"])
            self.norm.copy_(weights["norm"])

    def continue_from(self, head: Mapping[str, Tensor]) -> None:
        """Take over a head's weights, by the canonical names of ``drafters.eagle_file``; its draft vocabulary is this one's."""
        with torch.no_grad():
            # Here the states are divided on their way in; there the matrix does it.
            self.fc.copy_(head["fc"] * self.feature_scale)
            for stem in ("qkv", "o", "gate_up", "down", "mlp_norm"):
                getattr(self, stem).copy_(head[f"layers.0.{stem}"])
            self.input_norm.copy_(head["layers.0.attn_norm"])
            for stem in ("hidden_norm", "norm", "lm_head"):
                getattr(self, stem).copy_(head[stem])

    def _qkv(self, tokens: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [n, H, D], k and v [n, G, D], rotated."""
        d = (self.embed.shape[1],)
        embedded = functional.rms_norm(self.embed[tokens].float(), d, self.input_norm, self.eps)
        hidden = functional.rms_norm(states.float(), d, self.hidden_norm, self.eps)
        qkv = functional.linear(torch.cat((embedded, hidden), dim=1), self.qkv)
        heads = qkv.view(len(tokens), -1, self.head_dim)
        qk, v = torch.split(heads, [self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        q, k = torch.split(self._rotate(qk, positions), [self.num_heads, self.num_kv_heads], dim=1)
        return q, k, v

    def _rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None, None].double() * self.frequencies
        cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _attend(
        self, q: Tensor, true: tuple[Tensor, Tensor], own: list[tuple[Tensor, Tensor]], texts: Sequence[TextRows]
    ) -> Tensor:
        """[R, H * D] from q [R, H, D]: over the true pairs up to each row's own, and its own later ones."""
        groups = self.num_heads // self.num_kv_heads
        rows = len(q)
        grouped = q.view(rows, self.num_kv_heads, groups, self.head_dim) * self.scale
        own_scores = [(grouped * k[:, :, None]).sum(-1, keepdim=True) for k, _ in own]
        out = []
        for text in texts:
            n, m = text.stop - text.start, text.last - text.first
            part = grouped[text.first : text.last].permute(1, 2, 0, 3).reshape(self.num_kv_heads, groups * m, self.head_dim)
            keys, values = (x[text.start : text.stop].transpose(0, 1) for x in true)
            scores = (part @ keys.transpose(1, 2)).view(self.num_kv_heads, groups, m, n)
            future = torch.ones(m, n, dtype=torch.bool, device=q.device).triu(n - m + 1)
            scores = scores.masked_fill(future, -torch.inf)
            later = [s[text.first : text.last].permute(1, 2, 0, 3) for s in own_scores]
            probs = torch.cat([scores, *later], dim=-1).softmax(-1, dtype=torch.float32).to(q.dtype)
            mixed = (probs[..., :n].reshape(self.num_kv_heads, groups * m, n) @ values).view(self.num_kv_heads, groups, m, -1)
            for step, (_, v) in enumerate(own):
                mixed = mixed + probs[..., n + step, None] * v[text.first : text.last].transpose(0, 1)[:, None]
            out.append(mixed.permute(2, 0, 1, 3).reshape(m, -1))
        return torch.cat(out)

    def begin(self, batch: TextBatch) -> _Rollout:
        """Keys and values of the true pairs, and what the first step goes on from."""
        states = functional.linear(batch.features / self.feature_scale, self.fc)
        q, k, v = self._qkv(batch.tokens, states, batch.positions)
        return _Rollout(self, batch, (k, v), q[batch.rows], states[batch.rows])

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The layer's output, before the final norm."""
        x = residual.float() + functional.linear(attended, self.o)
        d = (x.shape[1],)
        gate, up = functional.linear(functional.rms_norm(x, d, self.mlp_norm, self.eps), self.gate_up).chunk(2, dim=-1)
        return x + functional.linear(functional.silu(gate) * up, self.down)

    def normed(self, states: Tensor) -> Tensor:
        """What the output head reads, [n, d], from what ``finish`` gave."""
        return functional.rms_norm(states, (states.shape[1],), self.norm, self.eps)

    def logits(self, states: Tensor) -> Tensor:
        """Logits [n, V'] of what ``finish`` gave."""
        return functional.linear(self.normed(states), self.lm_head)


class _Rollout:
    """Steps of one batch; ``advance`` goes one on and gives the rows' states."""

    def __init__(self, network: Eagle3Network, batch: TextBatch, true: tuple[Tensor, Tensor], q: Tensor, residual: Tensor) -> None:
        self._network, self._batch, self._true, self._q = network, batch, true, q
        self._residual, self._own, self._step = residual, list[tuple[Tensor, Tensor]](), 0

    def advance(self, tokens: Tensor | None = None) -> Tensor:
        """States [R, d] after the next step; ``tokens`` [R] are each row's token of this step, None at the first."""
        network, batch = self._network, self._batch
        if tokens is not None:
            self._step += 1
            self._q, k, v = network._qkv(tokens, self._residual, batch.positions[batch.rows] + self._step)
            self._own.append((k, v))
        attended = network._attend(self._q, self._true, self._own, batch.texts)
        self._residual = network.finish(attended, self._residual)
        return self._residual


def ahead(texts: Sequence[TextRows], num_rows: int, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each row the row of the same text ``step`` on, and whether there is one: int64 and bool [R]."""
    last = torch.empty(num_rows, dtype=torch.int64)
    for text in texts:
        last[text.first : text.last] = text.last - 1
    shifted = torch.arange(num_rows) + step
    return torch.minimum(shifted, last).to(device), (shifted <= last).to(device)


def ttt_loss(
    network: Eagle3Network, batch: TextBatch, num_steps: int, loss: str, step_decay: float = 1.0, hard: float = 0.0
) -> tuple[Tensor, list[StepResult]]:
    """The loss over ``num_steps`` steps, and how each did; rows whose label is not in the draft vocabulary are left out.

    A step weighs ``step_decay`` times what the one before does.
    """
    rollout = network.begin(batch)
    states, rows = list[Tensor](), list[Tensor]()
    for step in range(num_steps):
        at, inside = ahead(batch.texts, len(batch.rows), step, batch.rows.device)
        out = rollout.advance(None if step == 0 else batch.tokens[batch.rows + step * inside])
        kept = torch.nonzero(inside & (batch.label[at] >= 0))[:, 0]
        states.append(out[kept])
        rows.append(at[kept])
    decay = [step_decay**step for step in range(num_steps)]
    weights = [
        torch.full((len(one),), factor / sum(decay) / max(1, len(one)), device=one.device)
        for factor, one in zip(decay, rows, strict=True)
    ]
    normed, at = network.normed(torch.cat(states)), torch.cat(rows)
    total, each, right = HeadLoss.apply(  # type: ignore[no-untyped-call]
        normed, network.lm_head, target_probs(batch.target, hard), at, batch.label[at], torch.cat(weights), loss
    )
    sizes = [len(one) for one in rows]
    parts = zip(sizes, each.split(sizes), right.split(sizes), strict=True)
    return total, [StepResult(size, float(one.mean()), float(hits.float().mean())) for size, one, hits in parts]


def target_probs(target: Tensor, hard: float) -> Tensor:
    """Probabilities of the target in the draft vocabulary, of which ``hard`` is moved to the likeliest token; of its type."""
    out = torch.empty_like(target)
    for start in range(0, len(target), CHUNK_ROWS):
        part = target[start : start + CHUNK_ROWS].float().softmax(-1)
        if hard:
            top = part.max(-1, keepdim=True).indices
            part = part.mul_(1 - hard).scatter_add_(1, top, torch.full_like(top, hard, dtype=part.dtype))
        out[start : start + CHUNK_ROWS] = part
    return out


class HeadLoss(torch.autograd.Function):
    """Output head and loss at once, some rows after the others, so that what is as wide as the vocabulary stays in the cache.

    ``normed`` [n, d], ``weight`` [V', d], ``probs`` [R, V'] of which row ``at`` [n] is each row's, ``label`` [n], ``scale`` [n]
    what a row counts.  Gives the scaled sum, and each row's loss and whether its likeliest token is the label.

    ``ce``: cross-entropy.  ``tv``: one minus the sum of the smaller of both probabilities, which is the share of draft tokens that
    is refused.  ``lk``: from the first to the second as acceptance grows (2602.23881, hybrid).
    """

    @staticmethod
    def forward(
        ctx: Any, normed: Tensor, weight: Tensor, probs: Tensor, at: Tensor, label: Tensor, scale: Tensor, kind: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See the class; the gradients are computed along the way."""
        low, x = weight.to(probs.dtype), normed.to(probs.dtype)
        grad_x, grad_w = torch.empty_like(x), None
        each, right = torch.empty(len(x), device=x.device), torch.empty(len(x), dtype=torch.bool, device=x.device)
        for start in range(0, len(x), BLOCK_ROWS):
            block = slice(start, min(len(x), start + BLOCK_ROWS))
            logits = x[block] @ low.T
            for inner in range(block.start, block.stop, CHUNK_ROWS):
                rows = slice(inner, min(block.stop, inner + CHUNK_ROWS))
                here = slice(rows.start - block.start, rows.stop - block.start)
                each[rows], right[rows], grad = _row_loss(logits[here].float(), probs[at[rows]].float(), label[rows], kind)
                logits[here] = grad.mul_(scale[rows, None])
            grad_x[block] = logits @ low
            if weight.requires_grad:
                part = logits.T @ x[block]
                grad_w = part.float() if grad_w is None else grad_w.add_(part)
        ctx.save_for_backward(grad_x, grad_w)
        ctx.mark_non_differentiable(each, right)
        return (each * scale).sum(), each, right

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Scale the gradients of ``forward``."""
        grad_x, grad_w = ctx.saved_tensors
        return grad_x * scale.to(grad_x.dtype), None if grad_w is None else grad_w.mul_(scale), None, None, None, None, None


def _row_loss(z: Tensor, p: Tensor, label: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """(loss of each row, whether the label is likeliest, gradient by the logits); ``z`` is overwritten."""
    z -= z.amax(-1, keepdim=True)
    right = z.gather(1, label[:, None])[:, 0] >= 0
    expected = (p * z).sum(-1)
    q = z.exp_()
    total = q.sum(-1)
    entropy = total.log() * p.sum(-1) - expected
    q /= total[:, None]
    if kind == "ce":
        return entropy, right, q.sub_(p)
    below = (q < p).float()
    accepted = torch.minimum(q, p).sum(-1)
    tv_grad = q * ((q * below).sum(-1, keepdim=True) - below)
    share = torch.exp(-LK_RATE * accepted) if kind == "lk" else torch.zeros_like(accepted)
    grad = share[:, None] * (q - p) + (1 - share[:, None]) * tv_grad
    return share * entropy + (1 - share) * (1 - accepted), right, grad


@torch.no_grad()
def accepted_counts(network: Eagle3Network, batch: TextBatch, num_tokens: int) -> Tensor:
    """How many of ``num_tokens`` greedy draft tokens from each row on are the recorded ones: int64 [R]."""
    rollout = network.begin(batch)
    counts = torch.zeros(len(batch.rows), dtype=torch.int64, device=batch.rows.device)
    alive = torch.ones_like(counts, dtype=torch.bool)
    tokens = None
    for step in range(num_tokens):
        drafted = network.logits(rollout.advance(tokens)).argmax(-1)
        at, inside = ahead(batch.texts, len(batch.rows), step, batch.rows.device)
        alive &= inside & (drafted == batch.label[at])
        counts += alive
        tokens = network.draft_vocab[drafted]
    return counts


def acceptance(counts: Tensor, texts: Sequence[TextRows]) -> tuple[int, int]:
    """(emitted tokens, passes) of decoding the recorded answers with drafts of which ``counts`` are accepted."""
    emitted = passes = 0
    per_row = counts.tolist()
    for text in texts:
        at = text.first
        while at < text.last:
            step = min(per_row[at] + 1, text.last - at)
            at, emitted, passes = at + step, emitted + step, passes + 1
    return emitted, passes
