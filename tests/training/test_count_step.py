"""tools/count_step.py: what a compiled micro-step does on a GPU, counted without one."""

from dataclasses import replace

import count_step
import pytest
from count_step import CountConfig

from model import GPT, GPTConfig
from plaingpt.training.memory_fit import kept_bytes
from plaingpt.training.memory_planner import predict, step_settings

GPT2 = GPTConfig(block_size=64, vocab_size=1000, n_layer=2, n_head=2, n_embd=64, bias=False)
NEWER = replace(GPT2, n_head=1, rotary=True, qk_norm=True, mlp='relu2', conv=4, tied_head=False)
CONFIG = CountConfig(batch_size=64, total_batch_size=64 * 64, loss_chunk_tokens=2048)
TOKENS = 64 * 64


def kept_by(shape):
    """{dtype: bytes} that are kept for the backward pass."""
    return count_step.saved(count_step.step_graphs(shape, CONFIG)['forward'][0])


@pytest.mark.slow
def test_the_flops_counted_are_those_of_the_formula():
    """That of PaLM counts attention as if nothing were masked, and no padding."""
    graphs = count_step.step_graphs(GPT2, CONFIG)
    forward, backward = (count_step.kernels_of(*graphs[part], part == 'backward')
                         for part in ('forward', 'backward'))
    formula = GPT(GPT2).flops_per_token() - 12 / 2 * GPT2.n_layer * 64 * 64
    formula += 6 * 64 * (GPT2.padded_vocab_size - 1000)
    formula += 2 * 64 * 64  # the backward pass of attention computes its scores again
    found = sum(kernel.flops for kernel in forward + backward) / TOKENS
    assert found == pytest.approx(formula, rel=0.05)
    assert sum(1 for k in forward if k.flops) == 2 * (4 + 1) + 2 * 3  # two chunks of the loss


def test_blocks_keep_no_float32_activation_under_cudas_autocast():
    for shape in (GPT2, NEWER):
        kept = kept_by(shape)
        # What is in float32 is one or two numbers a token, and the gradient of the head.
        numbers = 4 * TOKENS * (2 * 5 * 2 + 2) + 4 * shape.padded_vocab_size * 64
        assert kept['float32'] <= numbers < 4 * TOKENS * 64 * 2, shape


def test_a_plan_counts_what_the_compiled_step_keeps():
    for shape in (GPT2, NEWER):
        step = step_settings(CONFIG, 'bfloat16')
        totals = predict(shape, step).totals
        before = sum(kept_bytes(shape, step))  # parameters, states of the optimizer
        planned, kept = totals['after forward'] - before, kept_by(shape).total()
        assert 0.97 * kept <= planned <= 1.1 * kept, shape


@pytest.mark.slow
def test_a_short_convolution_keeps_its_input_and_no_shifted_copy():
    more = kept_by(NEWER).total() - kept_by(replace(NEWER, conv=0)).total()
    assert more <= 2 * 2 * TOKENS * 64 + TOKENS  # bfloat16, in two layers


@pytest.mark.slow
def test_larger_chunks_of_the_loss_move_fewer_bytes():
    def moved(chunk):
        graphs = count_step.step_graphs(GPT2, replace(CONFIG, loss_chunk_tokens=chunk))
        return sum(kernel.bytes for kernel in count_step.kernels_of(*graphs['forward'], False))
    # Each chunk reads the head's weight, and reads, adds to and writes its gradient.
    assert moved(512) - moved(2048) >= 6 * 10 * 64 * GPT2.padded_vocab_size


def test_the_table_names_each_pass_and_the_gpu(capsys):
    count_step.main(['config/tiny.py', '--vocab_size=500', '--gpu=A100', '--compile=True'])
    out = capsys.readouterr().out
    assert '| tiny ' in out and 'forward' in out and 'backward' in out and 'A100' in out
    assert 'kept for the backward pass: bfloat16' in out
