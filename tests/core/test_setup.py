"""What setup() makes of the settings."""

from pathlib import Path

import pytest
from processes import launch
from torch.nn.modules.module import register_module_forward_pre_hook

import train
from model import MLP
from plaingpt.core.checkpoint import find


@pytest.fixture
def mlp_calls(tiny):
    """How often an MLP computes in a run with these options."""
    def count(*options):
        calls = []
        hook = register_module_forward_pre_hook(
            lambda module, _: calls.append(module) if isinstance(module, MLP) else None)
        with hook:
            train.main([*tiny, *options])
        return len(calls)
    return count


def test_full_activation_checkpointing_computes_each_block_twice(mlp_calls):
    steps = 6 * 2 * 2  # iterations, micro-steps, blocks
    without = mlp_calls('--activation_checkpointing=none', '--out_dir=without')
    assert mlp_calls('--activation_checkpointing=full', '--out_dir=with') == without + steps


def test_all_processes_take_the_settings_of_the_first(tiny, tmp_path):
    Path('mine.py').write_text('import os\nn_embd = 32 * (1 + int(os.environ["RANK"]))\n')
    words = [word for word in tiny if not word.startswith('--n_embd')]
    launch(train.main, 2, tmp_path, 'mine.py', *words)
    assert find(tmp_path / 'out').config.n_embd == 32
