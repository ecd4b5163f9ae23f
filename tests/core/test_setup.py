"""What setup() makes of the settings."""

from pathlib import Path

import pytest
from processes import launch
from runs import same, weights
from torch.nn.modules.module import register_module_forward_pre_hook

import train
from model import MLP


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
    Path('mine.py').write_text('import os\nlearning_rate = 0.01 * (1 + int(os.environ["RANK"]))\n')
    for out_dir, setting in (('measured', 'mine.py'), ('typed', '--learning_rate=0.01')):
        launch(train.main, 2, tmp_path, *tiny, setting, f'--out_dir={out_dir}')
    assert same(weights(Path('measured')), weights(Path('typed')))
