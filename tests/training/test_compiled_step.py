from functools import partial
from itertools import repeat

import pytest
import torch
from helpers import HostReads
from torch._dynamo.testing import CompileCounterWithBackend

import train
from model import GPTConfig
from plaingpt.experiments.step_speed import Workload, make_step
from plaingpt.training.memory_planner import StepSettings, one_step
from plaingpt.training.optimizers import OPTIMIZERS
from plaingpt.training.settings import TrainConfig

SMALL = GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=2, n_embd=32,
                  document_attention=True, document_start=0)


def test_a_run_compiles_two_graphs_one_to_train_and_one_to_evaluate(tiny, monkeypatch):
    # Evaluates, trains, looks at health, saves and evaluates again; 5 sequences end in a batch of 1
    counter = CompileCounterWithBackend('eager')
    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend=counter, fullgraph=True))
    torch._dynamo.reset()
    train.main([*tiny, '--compile=True', '--eval_tokens=80', '--health_interval=2',
                '--loss_chunk_tokens=24', '--dropout=0.1'])
    assert counter.frame_count == 2


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_a_step_never_waits_for_the_device(optimizer, dtype):
    config = TrainConfig(optimizer=optimizer, batch_size=2, gradient_accumulation_steps=2,
                         loss_chunk_tokens=24)
    batch = torch.randint(65, (2, 2, 16))
    work = Workload(config, SMALL, torch.device('cpu'), dtype, compile=False)
    _, _, step = make_step(work, repeat(batch))
    with HostReads() as reads:
        step()
        step()
    assert not reads.found
    with reads:
        assert batch.sum() > 0
    assert reads.found  # else this test would see nothing


@pytest.mark.slow  # Inductor and a C++ compiler take half a minute
def test_the_trial_of_a_batch_compiles_the_step_where_training_does():
    step = StepSettings(2, dtype='float32', device='cpu', config=TrainConfig(loss_chunk_tokens=24))
    for compile in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for _ in one_step(SMALL, step, torch.device('cpu'), compile):
            pass
        assert torch._dynamo.utils.counters['stats']['unique_graphs'] == compile
