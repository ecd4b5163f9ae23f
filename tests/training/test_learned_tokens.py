"""What a step learns from: the tokens that count, all alike however the step is split."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from helpers import CHAT, ask, write_chat

from model import GPT, GPTConfig
from plaingpt.data.dataset import open_dataset
from train import forward_backward

T, SEQUENCES = 48, 16  # in a step
NO_SCALER = torch.amp.GradScaler('cpu', enabled=False)


@pytest.fixture(scope='module')
def dataset(tmp_path_factory):
    """A conversation in each sequence, with answers of very different lengths."""
    asked = [ask('?' * (T - 8 - 2 * n), 'ab' * n) for n in (1, 1, 12) * 33]
    return open_dataset(write_chat(tmp_path_factory.mktemp('data') / 'chat', asked))


def gradients(model):
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def step(model, dataset, micro_steps=1, processes=1):
    """→ (the loss of a step, its gradients), of so many processes, which average theirs."""
    loss = 0.0
    for rank in range(processes):
        loader = dataset.loader('train', T, SEQUENCES // micro_steps // processes,
                                micro_steps=micro_steps, rank=rank, world_size=processes)
        batches = loader.train_batches(0)
        loss += forward_backward(model, batches, micro_steps, NO_SCALER, nullcontext())
        batches.close()
    return loss / processes, [gradient / processes for gradient in gradients(model)]


def said(idx):
    """Where the next token is the assistant's: idx (B, T) → bools (B, T)."""
    found = torch.zeros_like(idx, dtype=torch.bool)
    for row, speaking in zip(idx.tolist(), found, strict=True):
        now = False
        for t, token in enumerate(row):
            now = token == CHAT.roles['assistant'] or (
                now and token not in (CHAT.end_of_turn, CHAT.conversation))
            speaking[t] = now
    return found


@pytest.mark.parametrize('chunk, dtype, error', [(0, torch.float64, 1e-12),
                                                 (64, torch.float32, 5e-6)])
def test_the_gradient_is_that_of_the_answers_however_a_step_is_split(dataset, chunk, dtype, error):
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=T, vocab_size=CHAT.vocab_size, n_layer=1, n_head=2,
                          n_embd=32)).to(dtype)
    idx, targets, _ = dataset.loader('train', T, SEQUENCES).train_batch(0, 0)
    counts = (targets != -1).sum(1)
    assert counts.max() > 4 * counts.min()
    logp = F.log_softmax(model(idx)[0], -1)  # (B, T, V)
    expected = -logp[said(idx)].gather(1, targets[said(idx)][:, None]).mean()
    expected.backward()
    wanted = gradients(model)
    model.loss_chunk_tokens = chunk
    for micro_steps, processes in ((1, 1), (4, 1), (16, 1), (1, 2), (8, 2)):
        loss, found = step(model, dataset, micro_steps, processes)
        assert loss.item() == pytest.approx(expected.item(), rel=error)
        for one, other in zip(found, wanted, strict=True):
            assert (one - other).norm() <= error * other.norm()
