import json
import re
from dataclasses import replace

import pytest
import torch
from processes import ROOT

import plan
from configurator import load_config
from model import GPTConfig
from plaingpt.core.start import StartingPoint
from plaingpt.experiments.memory import Planner
from plaingpt.experiments.speed import estimate_step, planned_gpt_config
from plaingpt.inference.hf_architectures import ARCHITECTURES, SIZES
from plaingpt.system.formatting import duration
from plan import PlanConfig
from train import build

# of which a trace takes little time
GPT2 = [str(ROOT / 'config/gpt2_124m.py'), '--n_layer=1', '--batch_size=16', '--vocab_size=1000',
        '--dataset=no_such_dataset', '--activation_checkpointing=full']


PLANNERS = {}  # whose traces the tests share


@pytest.fixture
def planned(capsys, monkeypatch):
    """planned(option, …) → what plan.py prints."""
    def planned(*argv):
        plan.main([*argv])
        return capsys.readouterr().out
    monkeypatch.setattr(plan, 'CHECKPOINT_MODES', ['full'])  # fewer traces
    monkeypatch.setattr(plan, 'Planner', lambda *settings: PLANNERS.setdefault(
        repr(settings[1:]), Planner(*settings)))
    return planned


def total_gib(out):
    return float(re.search(r'([\d.]+) GiB  total', out)[1])


def fits(out):
    return 'does NOT fit' not in out


def test_the_table_of_owners_adds_up(planned):
    out = planned(*GPT2, '--gpu_memory_gb=80')
    sizes = re.findall(r'^ +([\d.]+) ([GM])iB', out, re.M)
    *owners, total = (float(size) / (1 if unit == 'G' else 1024) for size, unit in sizes)
    assert sum(owners) == pytest.approx(total, abs=0.03)
    assert fits(out)
    assert '32 × 16 sequences' in out
    assert '524,288' in out


@pytest.mark.parametrize(('argv', 'share', 'option'), [
    (['--processes=8', '--parallel=ddp'], 0.8, '--batch_size='),
    (['--activation_checkpointing=none', '--batch_size=1', '--n_layer=2', '--vocab_size=100'], 0.98,
     '--activation_checkpointing='),
    pytest.param(['--batch_size=1', '--n_layer=2', '--vocab_size=100', '--total_batch_size=65536'],
                 0.9, '--processes=', marks=pytest.mark.slow)])
def test_the_suggested_batch_is_the_largest_that_fits(argv, share, option, planned):
    argv = [*GPT2, *argv]
    memory = f'--gpu_memory_gb={share * total_gib(planned(*argv, "--gpu_memory_gb=80"))}'
    before = planned(*argv, memory)
    assert not fits(before)
    options = re.search('^fits with: (--.*)', before, re.M)[1].split()
    assert options[0].startswith(option)
    after = planned(*argv, memory, *options)
    assert fits(after)
    tokens = r'[\d,]+ per step'
    assert re.search(tokens, after)[0] == re.search(tokens, before)[0]
    batch_size, steps = (int(re.search(rf'--{name}=(\d+)', ' '.join(options))[1])
                         for name in ('batch_size', 'gradient_accumulation_steps'))
    assert not fits(planned(*argv, memory, *options, f'--batch_size={2 * batch_size}',
                            f'--gradient_accumulation_steps={steps // 2}'))


@pytest.fixture(scope='module')
def small(char_data):
    """The arguments of a plan for this machine, of the run of the fixture `trained`."""
    return [f'--dataset={char_data}', '--n_layer=2', '--n_head=2', '--n_embd=32',
            '--block_size=16', '--batch_size=4', '--gradient_accumulation_steps=2',
            '--max_iters=100', '--device=cpu']


def test_without_a_gpu_it_plans_for_this_machine(small, trained, planned):
    out = planned(*small)
    assert fits(out)
    assert 'CUDA' not in out
    assert re.search(r'about [\d.hms]+ at the step time', out)
    checkpoint = 2**20 * float(re.search(r'disk: ([\d.]+) MiB', out)[1])
    folder = next((trained / 'checkpoints').iterdir())
    written = sum(path.stat().st_size for path in folder.glob('*.safetensors'))
    assert written == pytest.approx(checkpoint, rel=0.2)  # names beside


def test_a_sequence_that_takes_long_is_not_timed(small):
    config = load_config(PlanConfig, [*small, '--block_size=65536'])
    gpt_config = config.gpt_config(93)
    assert estimate_step(build, gpt_config, config, torch.device('cpu'), 'float32') is None


def test_the_published_models_are_planned_without_their_weights():
    for name, *size in (('gpt2', 12, 12, 768), ('gpt2-medium', 24, 16, 1024),
                        ('gpt2-large', 36, 20, 1280), ('gpt2-xl', 48, 25, 1600)):
        start = StartingPoint(verifies=False)
        config = load_config(PlanConfig, [f'--init_from={name}', '--n_layer=3', '--block_size=512',
                                          '--dataset=no_such_dataset'], read_saved=start.read)
        shape, tokens, _ = planned_gpt_config(config, start)
        assert [shape.n_layer, shape.n_head, shape.n_embd] == size
        assert shape.vocab_size == 50257 and shape.block_size == 512
        assert shape.bias and tokens is None


def shape_of(*argv):
    start = StartingPoint(verifies=False)
    return planned_gpt_config(load_config(PlanConfig, argv, read_saved=start.read), start)[0]


COMMON = ['--block_size=16', '--dataset=no_such_dataset', '--dropout=0.1']


def test_pretrained_weights_are_planned_in_their_own_shape(tmp_path):
    theirs = GPTConfig(n_layer=3, n_head=2, n_embd=32, block_size=64, vocab_size=77)
    (tmp_path / 'config.json').write_text(json.dumps(  # and no weights beside
        {'model_type': 'gpt2', **ARCHITECTURES['gpt2'].write_config(theirs)}))
    torch.save({'model': {}, 'model_args': {key: getattr(theirs, key)
                                            for key in (*SIZES, 'bias')}}, tmp_path / 'ckpt.pt')
    expected = replace(theirs, block_size=16, dropout=0.1)
    assert shape_of(f'--init_from={tmp_path}', *COMMON) == replace(expected, n_inner=128)
    assert shape_of(f'--init_from={tmp_path}/ckpt.pt', *COMMON) == \
        replace(expected, mlp='gelu_erf')


@pytest.mark.parametrize('start', [
    '--init_from={}', '--init_from=resume --out_dir={}', '--init_from=auto --out_dir={}'])
def test_a_run_is_planned_in_its_own_shape(start, trained):
    shape = shape_of(*start.format(trained).split(), *COMMON)
    assert (shape.n_layer, shape.n_embd, shape.dropout) == (2, 32, 0.1)


@pytest.mark.parametrize('processes', [1, 8])
def test_the_hours_on_a_measured_gpu_are_those_that_its_steps_took(processes, planned):
    out = planned(str(ROOT / 'config/gpt2_124m.py'), '--dataset=no_such_dataset', '--gpu=H100',
                  '--batch_size=1', f'--processes={processes}', '--max_iters=75')
    assert f'{duration(75 / processes)} on {processes} H100' in out  # 8 × 125 ms per step
    assert '79.20 GiB' in out
