from __future__ import annotations

import numpy as np
import pytest
import torch

from foredraft.architecture import Architecture, LayerKind, Rope, Weight
from foredraft.ops import Geometry, KVStorage, PassLayout, create_ops, rotary_rows
from foredraft.ops.torch_ops import MAX_ROWS_WEIGHTS_LEFT, TorchOps
from foredraft.types import ModelFileError, Rows
from foredraft.weights import read_chunks
from hf_weights import vector

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
each_device = pytest.mark.parametrize("device", DEVICES)
CPU = torch.device("cpu")
ARCHITECTURE = Architecture("llama", 50, 32, 48, 6, 2, 8, 512, 1e-5, (LayerKind(Rope(1e4)),))


def ops(device: str = "cpu", dtype: torch.dtype = torch.float32) -> TorchOps:
    return TorchOps(torch.device(device), dtype)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def slow_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int, window: int | None) -> torch.Tensor:
    """One row [H, D] over its context [L, G, D], head by head, in float64."""
    first = 0 if window is None else max(0, position - window + 1)
    out = torch.empty(q.shape, dtype=torch.float64)
    for head in range(q.shape[0]):
        group = head * keys.shape[1] // q.shape[0]
        scores = keys[first : position + 1, group].double() @ q[head].double() * 0.3
        out[head] = torch.softmax(scores, 0) @ values[first : position + 1, group].double()
    return out


@each_device
@pytest.mark.parametrize("window", [None, 1, 3, 16, 1000])
def test_paged_attention_equals_a_loop_over_rows_and_heads(window: int | None, device: str) -> None:
    block_size, num_blocks = 4, 64
    storage = KVStorage(ARCHITECTURE, num_blocks, block_size, torch.device(device), torch.float32)
    free = np.random.default_rng(0).permutation(num_blocks).tolist()
    contexts, num_rows = (0, 1, 9, 30, 30, 12, 63), (5, 1, 1, 1, 3, 3, 1)
    batch, keys, values = [], [], []
    for i, (context, rows) in enumerate(zip(contexts, num_rows, strict=True)):
        table = [free.pop() for _ in range(-(-(context + rows) // block_size))]
        batch.append(Rows([0] * rows, context, rows, table))
        keys.append(random(context + rows, 2, 8, seed=2 * i))
        values.append(random(context + rows, 2, 8, seed=2 * i + 1))
        for position in range(context):
            where = table[position // block_size], position % block_size
            storage.keys[0][where], storage.values[0][where] = keys[i][position].to(device), values[i][position].to(device)
    geometry = Geometry.of(batch, block_size)
    new_keys = torch.cat([k[context:] for k, context in zip(keys, contexts, strict=True)]).to(device)
    new_values = torch.cat([v[context:] for v, context in zip(values, contexts, strict=True)]).to(device)
    q, mine = random(len(new_keys), 6, 8, seed=99).to(device), ops(device)
    slots = torch.from_numpy(geometry.slots()).to(device)
    layout = PassLayout(geometry, slots, slots, {}, {window: mine.plan_attention(geometry, window)})
    out = mine.attention(q, new_keys, new_values, storage, 0, layout, window, 0.3).cpu()
    row = 0
    for i, (context, rows) in enumerate(zip(contexts, num_rows, strict=True)):
        for position in range(context, context + rows):
            expected = slow_attention(q[row].cpu(), keys[i], values[i], position, window)
            torch.testing.assert_close(out[row].view(6, 8).double(), expected, rtol=0, atol=2e-6)
            row += 1


def test_padding_never_reads_a_neighbours_block() -> None:
    geometry = Geometry.of([Rows([0], 9, 1, [5, 6, 7]), Rows([0], 14, 1, [1, 2, 3, 4])], 4)
    (group,) = ops().plan_attention(geometry, None)
    assert group.blocks.view(2, 4).tolist() == [[5, 6, 7, 7], [1, 2, 3, 4]]


def test_a_sliding_window_reads_only_the_blocks_it_can_see() -> None:
    (group,) = ops().plan_attention(Geometry.of([Rows([0], 1000, 1, range(251))], 4), 8)
    assert group.blocks.tolist() == [248, 249, 250]


def test_padding_at_most_doubles_the_keys_of_a_sequence() -> None:
    geometry = Geometry.of([Rows([0], context, 1, range(300)) for context in (0, 5, 60, 100, 1000)], 4)
    for group in ops().plan_attention(geometry, None):
        contexts = [geometry.context_lengths[row] for row in group.rows.tolist()] if group.rows is not None else []
        assert contexts and group.num_keys <= 2 * min(contexts)


def test_decoding_without_a_window_needs_no_mask() -> None:
    (group,) = ops().plan_attention(Geometry.of([Rows([0], 9, 1, range(3))] * 2, 4), None)
    assert group.mask is None and group.rows is None


def test_slots_and_positions_follow_the_block_table() -> None:
    geometry = Geometry.of([Rows([1, 2, 3], 3, 1, [9, 4, 8]), Rows([1], 0, 1, [2])], 4)
    assert geometry.slots().tolist() == [39, 16, 17, 8]
    assert geometry.positions().tolist() == [3, 4, 5, 0]
    assert geometry.query_offsets == (0, 3, 4) and geometry.context_lengths == (6, 1)
    assert [table.tolist() for table in geometry.block_tables] == [[9, 4], [2]]


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_the_same_product_for_any_number_of_rows(bias: bool, dtype: torch.dtype, device: str) -> None:
    weight, offset, mine = random(40, 24), random(40, seed=1), ops(device, dtype)
    matrix = mine.load_matrix("w", vector(weight.numpy()))
    x = random(3 * MAX_ROWS_WEIGHTS_LEFT, 24, seed=2).to(device, dtype)
    expected = x.cpu().double() @ matrix.cpu().double().T + (offset.to(dtype).double() if bias else 0)
    for num_rows in range(len(x) + 1):
        out = mine.linear(x[:num_rows], matrix, offset.to(device, dtype) if bias else None)
        assert out.shape == (num_rows, 40) and out.is_contiguous() and out.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(out.cpu().double(), expected[:num_rows], rtol=0, atol=tolerance)
    assert mine.logits(x, matrix).dtype == torch.float32


def test_rope_rotates_each_pair_by_its_angle_even_at_far_positions() -> None:
    rope, positions = Rope(1e4), np.array([0, 1, 77, 130_000])
    qk = random(4, 3, 8)
    out = ops().rope(qk, rotary_rows(rope, positions, 8, CPU, torch.float32))
    pairs = torch.complex(qk[..., :4].double(), qk[..., 4:].double())
    turn = np.exp(1j * positions[:, None, None] * rope.inverse_frequencies(8))
    expected = pairs * torch.from_numpy(turn)
    torch.testing.assert_close(out.double(), torch.cat((expected.real, expected.imag), -1), rtol=0, atol=2e-6)


def test_rms_norm_takes_one_weight_per_head() -> None:
    x, weight = random(4, 3, 8), random(3, 8, seed=1)
    expected = torch.stack([ops().rms_norm(x[:, head], weight[head], 1e-3) for head in range(3)], 1)
    torch.testing.assert_close(ops().rms_norm(x, weight, 1e-3), expected)
    by_hand = x[:, 0] / (x[:, 0].pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight[0]
    torch.testing.assert_close(expected[:, 0], by_hand)


def test_the_gate_is_the_first_half() -> None:
    x = torch.tensor([[0.5, -2.0, 3.0, 4.0]])
    gate, up = x[:, :2], x[:, 2:]
    torch.testing.assert_close(ops().gated_activation(x, "silu"), gate * torch.sigmoid(gate) * up)
    inner = 0.7978845608 * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(ops().gated_activation(x, "gelu_tanh"), 0.5 * gate * (1 + torch.tanh(inner)) * up)


def test_embedding_gathers_and_scales() -> None:
    matrix = random(5, 4)
    torch.testing.assert_close(ops().embedding(torch.tensor([3, 0]), matrix, 2.5), 2.5 * matrix[[3, 0]])


def test_chunks_cover_a_weight_once_and_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.weights.CHUNK_BYTES", 100)
    values = np.arange(70, dtype=np.float32).reshape(14, 5)
    values.flags.writeable = False
    chunks = list(read_chunks("w", vector(values)))
    assert [start for start, _ in chunks] == [0, 5, 10]
    assert (np.concatenate([rows for _, rows in chunks]) == values).all()
    assert (ops().load_matrix("w", vector(values)).numpy() == values).all()


def test_rows_of_another_shape_than_promised_name_the_tensor() -> None:
    broken = Weight((8, 4), "F32", lambda start, stop: np.zeros((stop - start, 3), np.float32))
    with pytest.raises(ModelFileError, match=r"'layers.0.o' must have shape \(8, 4\)"):
        ops().load_matrix("layers.0.o", broken)


def test_the_cache_starts_as_zeros_of_the_bytes_it_says() -> None:
    storage = KVStorage(ARCHITECTURE, 3, 4, CPU, torch.float16)
    tensors = storage.keys + storage.values
    assert storage.bytes == sum(tensor.nbytes for tensor in tensors) == 2 * 3 * 4 * 2 * 8 * 2
    assert not any(tensor.any() for tensor in tensors)


def test_create_ops_sets_threads_only_when_asked() -> None:
    before = torch.get_num_threads()
    try:
        assert create_ops(CPU, torch.float32).exactness == "numeric"
        assert torch.get_num_threads() == before
        create_ops(CPU, torch.float32, threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
