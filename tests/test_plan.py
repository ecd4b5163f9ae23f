import json
import re
from dataclasses import replace

import pytest
import torch
from processes import ROOT, fails

import model
import plan
from configurator import load_config
from model import GPT, GPTConfig
from plaingpt.experiments import speed
from plaingpt.experiments.speed import planned_gpt_config
from plaingpt.inference.hf_architectures import ARCHITECTURES, SIZES
from plaingpt.system.formatting import GIB, duration
from plaingpt.training.start import Start
from plan import PlanConfig

# Few traces of a step serve all these plans: two layers.
GPT2 = [str(ROOT / 'config/gpt2_124m.py'), '--n_layer=2', '--batch_size=16',
        '--dataset=no_such_dataset', '--activation_checkpointing=full']


def test_the_table_adds_up_and_the_batch_that_is_chosen_fits(capsys, monkeypatch):
    monkeypatch.setattr(plan, 'CHECKPOINT_MODES', ['full'])  # fewer traces

    def planned(*argv):
        plan.main([*GPT2, *argv])
        out = capsys.readouterr().out
        sizes = re.findall(r'^ +([\d.]+) ([GM])iB', out, re.M)
        *owners, total = (float(size) / (1 if unit == 'G' else 1024) for size, unit in sizes)
        assert sum(owners) == pytest.approx(total, abs=0.03)
        processes, batch_size = map(int, re.search(r'(\d+) × (\d+) sequences', out).groups())
        return out, total, processes * batch_size, batch_size

    out, total, sequences, batch_size = planned('--gpu_memory_gb=80')
    assert 'fits in 80.00 GiB' in out and (sequences, batch_size) == (512, 16)
    assert '524,288 per step' in out and 'no_such_dataset is not prepared' in out
    assert 'does NOT fit' in planned(f'--gpu_memory_gb={total - 0.1}')[0]
    out, _, sequences, batch_size = planned(f'--gpu_memory_gb={total - 0.1}',
                                            '--batch_size=auto', '--total_batch_size=524288')
    assert ' fits in' in out and sequences == 512 and 1 < batch_size < 16
    out, shared, *_ = planned(f'--gpu_memory_gb={total - 0.1}', '--processes=8')
    assert ', fsdp;' in out and ' fits in' in out and shared < total


@pytest.mark.parametrize(('argv', 'share', 'helps'), [
    ([], 0.8, '--batch_size='),
    (['--total_batch_size=0', '--gradient_accumulation_steps=24'], 0.8, '--batch_size='),
    (['--processes=8', '--parallel=ddp'], 0.8, '--batch_size='),
    (['--activation_checkpointing=none', '--batch_size=1', '--vocab_size=100'], 0.98,
     '--activation_checkpointing='),
    (['--batch_size=1', '--vocab_size=100'], 0.95, '--processes=')])
def test_where_a_plan_does_not_fit_the_options_that_it_names_do_and_a_larger_batch_does_not(
        argv, share, helps, capsys, monkeypatch):
    monkeypatch.setattr(plan, 'CHECKPOINT_MODES', ['full'])  # fewer traces

    def planned(*options):
        plan.main([*GPT2, *argv, *options])
        out = capsys.readouterr().out
        total = float(re.search(r'([\d.]+) GiB  total', out)[1])
        return out, total, re.search(r'[\d,]+ per step', out)[0]

    _, total, tokens = planned('--gpu_memory_gb=80')
    memory = f'--gpu_memory_gb={share * total}'
    out, *_ = planned(memory)
    options = re.search('^what fits: (--.*)', out, re.M)[1].split()
    assert 'does NOT fit' in out and options[0].startswith(helps)
    again, _, tokens_then = planned(memory, *options)
    assert ' fits in' in again and 'what fits' not in again and tokens_then == tokens
    batch_size, steps = (int(re.search(rf'--{name}=(\d+)', ' '.join(options))[1])
                         for name in ('batch_size', 'gradient_accumulation_steps'))
    more, *_ = planned(memory, *options, f'--batch_size={2 * batch_size}',
                       f'--gradient_accumulation_steps={steps // 2}')
    assert 'does NOT fit' in more


def test_of_a_model_that_is_too_deep_only_a_few_layers_are_made(capsys, monkeypatch):
    made, block = [], model.Block
    monkeypatch.setattr(model, 'Block', lambda config: made.append(config) or block(config))
    monkeypatch.setattr(plan, 'CHECKPOINT_MODES', ['full'])  # fewer traces
    plan.main([*GPT2, '--n_layer=100000', '--device=cpu', '--dtype=float32'])
    out = capsys.readouterr().out
    assert 'does NOT fit' in out and 'what fits: nothing' in out and len(made) < 500
    shape = load_config(PlanConfig, GPT2).gpt_config(50257)
    two, four = (GPT(replace(shape, n_layer=n)).num_parameters() for n in (2, 4))
    assert f'each of {two + 49_999 * (four - two):,} parameters' in out


@pytest.fixture(scope='module')
def small(char_data):
    """The arguments of a plan for this machine, of the run of the fixture `trained`."""
    return [f'--dataset={char_data}', '--n_layer=2', '--n_head=2', '--n_embd=32',
            '--block_size=16', '--batch_size=4', '--gradient_accumulation_steps=2',
            '--max_iters=100', '--device=cpu']


def test_without_a_gpu_it_plans_for_this_machine_and_times_a_step(
        small, trained, monkeypatch, capsys):
    monkeypatch.setattr(plan.devices, 'device_memory', lambda *_: 4 * GIB)
    plan.main(small)
    out = capsys.readouterr().out
    assert 'fits in 4.00 GiB' in out and 'malloc' in out and 'CUDA' not in out
    assert 'at the speed of a step here' in out and '128 per step, 12.8k in total' in out
    checkpoint = 2**20 * float(re.search(r'disk: ([\d.]+) MiB', out)[1])
    folder = next((trained / 'checkpoints').iterdir())
    written = sum(path.stat().st_size for path in folder.glob('*.safetensors'))
    assert written == pytest.approx(checkpoint, rel=0.2)  # names beside


def test_a_batch_that_takes_long_is_timed_by_one_sequence(small, monkeypatch):
    config, sizes = load_config(PlanConfig, small), []
    shape = config.gpt_config(93)

    def time_step(step, batches, lr):
        sizes.append(len(next(batches)[0]))
        return sizes[-1] * seconds, 0.5

    monkeypatch.setattr(speed, 'new_step', lambda *_: (None, GPT(shape)))
    monkeypatch.setattr(speed, 'time_step', time_step)
    for seconds, largest in ((0.1, 4), (1.0, 1)):
        sizes.clear()
        assert speed.estimate_step(shape, config, torch.device('cpu'), 'float32') \
            == pytest.approx(2 * 4 * seconds + 0.5)
        assert max(sizes) == largest
    monkeypatch.setattr(speed, 'MAX_CPU_FLOPS', 1e4)  # even one takes long
    assert speed.estimate_step(shape, config, torch.device('cpu'), 'float32') is None


def test_the_published_models_are_planned_without_their_weights():
    for name, *size in (('gpt2', 12, 12, 768), ('gpt2-medium', 24, 16, 1024),
                        ('gpt2-large', 36, 20, 1280), ('gpt2-xl', 48, 25, 1600)):
        start = Start(verifies=False)
        config = load_config(PlanConfig, [f'--init_from={name}', '--n_layer=3', '--block_size=512',
                                          '--dataset=no_such_dataset'], read_saved=start.read)
        shape, tokens, _ = planned_gpt_config(config, start)
        assert [shape.n_layer, shape.n_head, shape.n_embd] == size
        assert shape.vocab_size == 50257 and shape.block_size == 512
        assert shape.bias and tokens is None


def find_shape(*argv):
    start = Start(verifies=False)
    return planned_gpt_config(load_config(PlanConfig, argv, read_saved=start.read), start)[0]


def test_models_of_a_run_a_folder_and_nanogpt_are_planned_in_their_own_shape(trained, tmp_path):
    ours = GPTConfig(n_layer=3, n_head=2, n_embd=32, block_size=64, vocab_size=77)
    (tmp_path / 'config.json').write_text(json.dumps(  # and no weights beside
        {'model_type': 'gpt2', **ARCHITECTURES['gpt2'].write_config(ours)}))
    torch.save({'model': {}, 'model_args': {key: getattr(ours, key) for key in (*SIZES, 'bias')}},
               tmp_path / 'ckpt.pt')
    common = ['--block_size=16', '--dataset=no_such_dataset', '--dropout=0.1']
    expected = replace(ours, block_size=16, dropout=0.1)
    assert find_shape(f'--init_from={tmp_path}', *common) == replace(expected, n_inner=128)
    assert find_shape(f'--init_from={tmp_path}/ckpt.pt', *common) == \
        replace(expected, mlp='gelu_erf')
    for start in ([f'--init_from={trained}'], ['--init_from=resume', f'--out_dir={trained}'],
                  ['--init_from=auto', f'--out_dir={trained}']):
        shape = find_shape(*start, *common)
        assert (shape.n_layer, shape.n_embd, shape.dropout) == (2, 32, 0.1)
    shape = find_shape('--init_from=auto', f'--out_dir={tmp_path}/new', '--n_layer=5', *common)
    assert shape.n_layer == 5


def test_the_hours_on_a_measured_gpu_are_those_that_its_steps_took(capsys):
    for processes in 1, 8:
        plan.main([str(ROOT / 'config/gpt2_124m.py'), '--dataset=no_such_dataset', '--gpu=H100',
                   f'--processes={processes}', '--max_iters=75'])
        out = capsys.readouterr().out
        assert f'{duration(75 / processes)} on {processes} H100' in out  # 8 × 125 ms per step
        assert 'fits in 79.20 GiB' in out


def test_a_gpu_that_was_not_measured_is_refused(capsys, monkeypatch):
    line = fails(capsys, monkeypatch, plan.main, '--gpu=4090')
    assert 'gpu=4090' in line and '--gpu_memory_gb' in line
