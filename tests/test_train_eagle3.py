from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from foredraft.drafters.ngram_table import TargetIdentity
from foredraft.train import eagle3, fit_eagle3, loop
from foredraft.train.eagle3 import Eagle3Network, TextBatch, TextRows, acceptance, accepted_counts, ahead, ttt_loss
from foredraft.train.features import Text
from foredraft.train.fit_eagle3 import Eagle3Job, Eagle3Options, Fit, choose_vocab, refuse_target, split, tapped_layers
from foredraft.train.head_file import head_config, head_tensors
from foredraft.train.loop import Budget
from foredraft.types import CapacityError, ConfigError, UnsupportedModelError
from head_toys import ARCHITECTURE, HIDDEN, NUM_TAPS, VOCAB, as_file, random_network, random_texts, random_weights

DRAFT_VOCAB = [1, 2, 5, 7, 8, 11, 12, 20, 21, 30, 33, 39]
IDENTITY = TargetIdentity("toy", VOCAB, "digest")
LENGTHS = [(9, 3), (14, 8), (6, 1)]


def job_of(texts: list[Text], options: Eagle3Options | None = None) -> Eagle3Job:
    vocab = torch.tensor(DRAFT_VOCAB)
    return Eagle3Job(ARCHITECTURE, random_weights(), texts, texts, vocab, options or Eagle3Options(), device=torch.device("cpu"))


def batch_of(texts: list[Text]) -> TextBatch:
    return job_of(texts).batch(texts)


# ------------------------------------------------------------------------------------------------ the network


def plain_chain(network: Eagle3Network, tokens: list[int], features: Tensor, num_steps: int) -> list[Tensor]:
    """States of ``num_steps`` steps of a draft after the pairs (features[i - 1], tokens[i]), one query at a time, in plain torch.

    ``tokens`` go on with the tokens of the later steps.
    """
    config, d = ARCHITECTURE, (HIDDEN,)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    out: list[Tensor] = []

    def rotate(x: Tensor, position: int) -> Tensor:
        angle = position * torch.from_numpy(config.layers[0].rope.inverse_frequencies(config.head_dim))
        turned = torch.view_as_complex(torch.stack(x.double().chunk(2, dim=-1), dim=-1)) * torch.polar(
            torch.ones_like(angle), angle
        )
        return torch.cat((turned.real, turned.imag), dim=-1).float()

    num_true = len(tokens) - num_steps
    for i in range(1, len(tokens)):
        is_true = i <= num_true
        state = network.fc @ (features[i - 1] / network.feature_scale) if is_true else out[-1]
        joined = torch.cat(
            (
                functional.rms_norm(network.embed[tokens[i]], d, network.input_norm, config.rms_norm_eps),
                functional.rms_norm(state, d, network.hidden_norm, config.rms_norm_eps),
            )
        )
        q, k, v = torch.split((network.qkv @ joined).view(-1, config.head_dim), [4, 2, 2])
        keys.append(rotate(k, i).repeat_interleave(2, 0))
        values.append(v.repeat_interleave(2, 0))
        scores = torch.einsum("hd,nhd->hn", rotate(q, i), torch.stack(keys)) / math.sqrt(config.head_dim)
        attended = torch.einsum("hn,nhd->hd", scores.softmax(-1), torch.stack(values)).reshape(-1)
        x = state + network.o @ attended
        gate, up = (network.gate_up @ functional.rms_norm(x, d, network.mlp_norm, config.rms_norm_eps)).chunk(2)
        x = x + network.down @ (functional.silu(gate) * up)
        if i >= num_true:
            out.append(x)
    return out


def test_later_steps_see_more_than_true_pairs_and_own_steps() -> None:
    texts, network, num_steps = random_texts(LENGTHS), random_network(DRAFT_VOCAB), 3
    batch = batch_of(texts)
    rollout = network.begin(batch)
    states = []
    for step in range(num_steps):
        _, inside = ahead(batch.texts, len(batch.rows), step, batch.rows.device)
        states.append(rollout.advance(None if step == 0 else batch.tokens[batch.rows + step * inside]))
    for text, where in zip(texts, batch.texts, strict=True):
        features = torch.from_numpy(text.states[:, : NUM_TAPS * HIDDEN]).float()
        for row in range(where.first, where.last):
            last_pair = text.num_prompt + row - where.first
            steps = min(num_steps, where.last - row)
            tokens = text.tokens[: last_pair + steps]
            expected = plain_chain(network, tokens, features, steps)
            for step in range(steps):
                torch.testing.assert_close(states[step][row], expected[step], rtol=1e-4, atol=1e-4)


def test_drafts_of_the_evaluation_follow_the_recorded_text_instead_of_themselves() -> None:
    network, vocab, kinds = random_network(DRAFT_VOCAB), torch.tensor(DRAFT_VOCAB), set()
    with torch.no_grad():
        for text in random_texts([(16, 3), (11, 1)]):
            features = torch.from_numpy(text.states[:, : NUM_TAPS * HIDDEN]).float()

            def drafted(tokens: list[int], num_steps: int, features: Tensor = features) -> int:
                state = plain_chain(network, tokens, features, num_steps)[-1]
                return int(vocab[network.logits(state[None]).argmax()])

            # What the first step guesses, but for some tokens.
            tokens = text.tokens[: text.num_prompt + 1]
            while len(tokens) < len(text.tokens):
                tokens.append(39 if len(tokens) % 5 == 4 else drafted(tokens, 1))
            batch = batch_of([text._replace(tokens=tokens)])
            for row, count in enumerate(accepted_counts(network, batch, 3).tolist()):
                chain, num_true, expected = tokens[: text.num_prompt + row + 1], text.num_prompt + row + 1, 0
                while expected < 3:
                    chain.append(drafted(chain, expected + 1))
                    if num_true + expected >= len(tokens) or chain[-1] != tokens[num_true + expected]:
                        break
                    expected += 1
                assert count == expected
                kinds.add(count)
    assert kinds >= {0, 1, 2}


def test_acceptance_length_counts_rows_that_decoding_skips() -> None:
    # Rows 0..4: a pass that accepts 2 goes on at row 3; the second text ends within its draft.
    counts = torch.tensor([2, 3, 3, 0, 1, 3, 0])
    assert acceptance(counts, [TextRows(0, 9, 0, 5), TextRows(9, 14, 5, 7)]) == (5 + 2, 3 + 1)


# ------------------------------------------------------------------------------------------------ losses


def slow_loss(kind: str, logits: Tensor, probs: Tensor) -> Tensor:
    q = logits.softmax(-1)
    entropy, refused = -(probs * logits.log_softmax(-1)).sum(-1), 1 - torch.minimum(q, probs).sum(-1)
    if kind == "ce":
        return entropy
    share = torch.exp(-eagle3.LK_RATE * (1 - refused)).detach() if kind == "lk" else torch.zeros_like(refused)
    return share * entropy + (1 - share) * refused


@pytest.mark.parametrize("kind", eagle3.LOSSES)
def test_gradient_in_blocks_differs_from_that_of_the_loss(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eagle3, "BLOCK_ROWS", 4)
    monkeypatch.setattr(eagle3, "CHUNK_ROWS", 3)
    torch.manual_seed(0)
    x, weight = torch.randn(9, 5, requires_grad=True), torch.randn(7, 5, requires_grad=True)
    probs, at = torch.randn(6, 7).mul(3).softmax(-1), torch.tensor([0, 1, 2, 3, 4, 5, 1, 2, 3])
    label, scale = torch.randint(0, 7, (9,)), torch.rand(9)
    fast, each, right = eagle3.HeadLoss.apply(x, weight, probs, at, label, scale, kind)  # type: ignore[no-untyped-call]
    gradients = torch.autograd.grad(2 * fast, (x, weight))
    slow = slow_loss(kind, x @ weight.T, probs[at])
    torch.testing.assert_close(each, slow.detach())
    assert right.tolist() == ((x @ weight.T).argmax(-1) == label).tolist()
    for ours, exact in zip(gradients, torch.autograd.grad(2 * (slow * scale).sum(), (x, weight)), strict=True):
        torch.testing.assert_close(ours, exact)


def test_a_text_learns_from_its_neighbour_in_the_batch() -> None:
    texts, network = random_texts(LENGTHS, seed=3), random_network(DRAFT_VOCAB)

    def rows_and_loss(part: list[Text]) -> list[tuple[int, float]]:
        _, steps = ttt_loss(network, batch_of(part), 3, "ce")
        return [(one.num_rows, one.num_rows * one.loss if one.num_rows else 0.0) for one in steps]

    whole, parts = rows_and_loss(texts), [rows_and_loss([text]) for text in texts]
    for step in range(3):
        assert whole[step][0] == sum(part[step][0] for part in parts) > 0
        assert whole[step][1] == pytest.approx(sum(part[step][1] for part in parts), rel=0.03)


def test_rows_without_a_draftable_label_are_learned_from() -> None:
    texts = random_texts([(12, 2)])
    batch = batch_of(texts)
    labels = texts[0].tokens[3:]
    _, steps = ttt_loss(random_network(DRAFT_VOCAB), batch, 2, "ce")
    assert [one.num_rows for one in steps] == [sum(t in DRAFT_VOCAB for t in labels), sum(t in DRAFT_VOCAB for t in labels[1:])]


def test_target_distribution_is_not_that_of_the_target() -> None:
    weights, texts = random_weights(), random_texts([(8, 3)])
    batch = batch_of(texts)
    states = torch.from_numpy(texts[0].states[3:-1, NUM_TAPS * HIDDEN :]).float()
    normed = functional.rms_norm(states, (HIDDEN,), weights["norm"], ARCHITECTURE.rms_norm_eps)
    expected = normed @ weights["embed"][DRAFT_VOCAB].T
    torch.testing.assert_close(batch.target.float(), expected, rtol=0.05, atol=0.15)


# ------------------------------------------------------------------------------------------------ choices


def test_vocabulary_is_not_of_the_most_frequent_tokens() -> None:
    def text(tokens: list[int]) -> Text:
        return Text(tokens, 1, random_texts([(len(tokens), 1)])[0].states)

    texts = [text([9, 4, 4, 7]), text([4, 7, 3])]
    assert choose_vocab(texts, 2).tolist() == [4, 7]
    assert choose_vocab(texts, 3).tolist() == [3, 4, 7]
    assert choose_vocab(texts, 100).tolist() == [3, 4, 7, 9]


def test_texts_held_out_change_when_more_are_written() -> None:
    texts = random_texts([(6, 2)] * 200)
    few, many = split(texts[:100])[1], split(texts)[1]
    assert [id(text) for text in many[: len(few)]] == [id(text) for text in few] and len(few) == 5
    train, held_out = split(random_texts([(4, 3), (6, 2), (6, 2)]))
    assert (len(train), len(held_out)) == (1, 1)


def test_questions_are_not_learned_from_or_the_header_of_all_texts_is() -> None:
    states = random_texts([(8, 5)])[0].states
    texts = [Text([1, 2, 3, 10 + i, 4, 5, 6, 7], 5, states) for i in range(4)]
    train, held_out = split(texts)
    assert [text.num_prompt for text in train] == [3, 3] and [text.num_prompt for text in held_out] == [5, 5]
    assert [text.num_prompt for text in split([texts[0]] * 4)[0]] == [5, 5]
    assert job_of(train).batch(train).label.shape == (2 * 4,)


def test_shallow_targets_and_other_layers_are_accepted() -> None:
    assert tapped_layers(30) == (2, 15, 27)
    with pytest.raises(UnsupportedModelError, match="5 layers is too shallow"):
        tapped_layers(5)
    gemma = ARCHITECTURE.__class__(**{**vars(ARCHITECTURE), "family": "gemma3", "sandwich_norms": True})
    with pytest.raises(UnsupportedModelError, match="gemma3"):
        refuse_target(gemma)


def test_options_out_of_range_are_taken() -> None:
    with pytest.raises(ConfigError, match="'lk'"):
        Eagle3Options(loss="lc")
    with pytest.raises(ConfigError, match="steps must be from 1 to 8, not 0"):
        Eagle3Options(num_steps=0)


# ------------------------------------------------------------------------------------------------ a whole training


class Killed(Exception):
    pass


def fit(out: Path, texts: list[Text], epochs: float = 3.0) -> Fit:
    options = Eagle3Options(draft_vocab=10, texts_per_step=2, learning_rate=5e-3)
    weights, budget = as_file(random_weights()), Budget(epochs, warmup=2)
    return Fit(ARCHITECTURE, weights, texts, (2, 3, 4), IDENTITY, options, budget, out, "cpu", None, {"recipe": 1})


def test_loss_does_not_fall(tmp_path: Path) -> None:
    lines: list[str] = []
    files = fit(tmp_path, random_texts([(30, 4)] * 12, period=9), epochs=20.0).run(lines.append)
    curve = json.loads((tmp_path / "curve.json").read_text())
    assert curve[-1]["loss"] < 0.5 * curve[1]["loss"]
    assert curve[-1]["acceptance_length"] > 3.0 > curve[0]["acceptance_length"]
    assert all(file.stat().st_size for file in files) and (tmp_path / "curve.html") in files
    assert not (tmp_path / fit_eagle3.CHECKPOINT).exists()
    provenance = json.loads((tmp_path / "provenance.json").read_text())
    assert provenance["target"] == vars(IDENTITY) and provenance["recipe"] == 1 and provenance["held_out"] == curve[-1]
    assert any("acceptance length" in line for line in lines)


def test_a_killed_training_gives_another_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = random_texts([(20, 4)] * 10, period=7)
    fit(tmp_path / "whole", texts).run(lambda line: None)
    step, calls = Eagle3Job.step, 0

    def dies(self: Eagle3Job, *args: object) -> dict[str, float]:
        nonlocal calls
        calls += 1
        if calls in (4, 7):
            raise Killed
        return step(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Eagle3Job, "step", dies)
    monkeypatch.setattr(loop, "SECONDS_PER_CHECKPOINT", 0.0)
    for _ in range(2):
        with pytest.raises(Killed):
            fit(tmp_path / "killed", texts).run(lambda line: None)
    lines: list[str] = []
    fit(tmp_path / "killed", texts).run(lines.append)
    assert any("going on from a checkpoint" in line for line in lines)
    assert (tmp_path / "killed/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


def test_a_checkpoint_of_other_texts_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = random_texts([(20, 4)] * 10, period=7), random_texts([(20, 4)] * 10, seed=1, period=7)
    monkeypatch.setattr(loop, "SECONDS_PER_CHECKPOINT", 0.0)
    monkeypatch.setattr(fit_eagle3, "write_head", lambda *args: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
        fit(tmp_path, first).run(lambda line: None)
    lines: list[str] = []
    with pytest.raises(Killed):
        fit(tmp_path, second).run(lines.append)
    assert any("other settings" in line for line in lines) and not any("going on" in line for line in lines)


def test_a_broken_checkpoint_stops_the_training(tmp_path: Path) -> None:
    (tmp_path / fit_eagle3.CHECKPOINT).write_bytes(b"PK\x03\x04 broken")
    fit(tmp_path, random_texts([(20, 4)] * 6, period=7), epochs=0.5).run(lambda line: None)
    assert (tmp_path / "model.safetensors").is_file()


def test_no_space_for_a_checkpoint_is_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CapacityError, match=r"No space left on device.*goes on"):
        loop.save_checkpoint(tmp_path / "x", {})
    assert list(tmp_path.iterdir()) == []


def test_too_few_texts_train_a_head(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 4 texts, not 1; ask for more"):
        fit(tmp_path, random_texts([(20, 4)])).run(lambda line: None)


def test_hours_are_ignored() -> None:
    budget = Budget(epochs=8, hours=0.5, warmup=10)
    assert budget.progress(epochs=100, seconds=900) == 0.5
    assert budget.rate(0.5, step=100) == 0.5 and budget.rate(0.0, step=0) == 0.1 and budget.rate(1.0, step=100) == 0.0
    with pytest.raises(ConfigError, match="hours must be above 0"):
        Budget(hours=0.0)
    with pytest.raises(ConfigError, match="epochs must be above 0"):
        Budget(epochs=-1.0)


# ------------------------------------------------------------------------------------------------ the folder


def test_saved_weights_compute_another_head(tmp_path: Path) -> None:
    fit(tmp_path, random_texts([(20, 4)] * 6, period=9), epochs=1.0).run(lambda line: None)
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == set(head_tensors(random_network(DRAFT_VOCAB), ARCHITECTURE))
    assert "embed_tokens.weight" not in saved
    vocab = torch.arange(len(saved["d2t"])) + saved["d2t"]
    assert saved["t2d"].dtype == torch.bool and torch.nonzero(saved["t2d"])[:, 0].tolist() == vocab.tolist()
    assert saved["layers.0.self_attn.q_proj.weight"].shape == (32, 2 * HIDDEN)


def test_scale_of_the_states_is_lost_in_the_folder() -> None:
    network = random_network(DRAFT_VOCAB)
    saved = head_tensors(network, ARCHITECTURE)["fc.weight"].float()
    features = torch.randn(5, NUM_TAPS * HIDDEN)
    expected = functional.linear(features / network.feature_scale, network.fc)
    torch.testing.assert_close(features @ saved.T, expected, rtol=0.05, atol=0.1)


def test_config_names_other_layers() -> None:
    config = head_config(ARCHITECTURE, (2, 3, 4), 10, "toy")
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4] and config["draft_vocab_size"] == 10
    assert config["transformer_layer_config"]["num_hidden_layers"] == 1
    assert config["speculators_config"]["verifier"]["name_or_path"] == "toy"


@pytest.mark.parametrize(
    ("units", "dtype"),
    [
        ({"avx2": True, "avx512_bf16": False, "amx_bf16": False}, torch.float32),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True, "avx512_bf16": False}, torch.bfloat16),
        ({}, torch.float32),
    ],
)
def test_a_cpu_without_units_for_bfloat16_converts_at_every_product(
    monkeypatch: pytest.MonkeyPatch, units: dict[str, bool], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units)
    with loop.autocast(torch.device("cpu")):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    job = job_of(random_texts(LENGTHS))
    assert job.batch(random_texts(LENGTHS)).target.dtype == dtype
    assert math.isfinite(job.step([0, 1], 0.9, 1.0)["loss"])
