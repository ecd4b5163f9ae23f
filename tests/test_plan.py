import io
import json
from contextlib import redirect_stdout
from dataclasses import replace

import pytest
import torch
from helpers import ROOT, fails

import plan
from configurator import load_config
from model import GPTConfig
from plaingpt.experiments import speed as step_speed
from plaingpt.inference.hf_architectures import ARCHITECTURES, SIZES
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import GIB
from plaingpt.system.gpus import GPUS
from plaingpt.training import memory
from plaingpt.training.start import Start
from plan import PlanConfig

# Few traces of a step serve all these plans: two layers.
GPT2 = [str(ROOT / 'config/gpt2_124m.py'), '--n_layer=2', '--batch_size=16',
        '--dataset=no_such_dataset']


def printed(*arguments):
    with redirect_stdout(io.StringIO()) as out:
        plan.main(arguments)
    return out.getvalue()


def planned(*arguments):
    return json.loads(printed(*arguments, '--json'))


def test_a_batch_that_does_not_fit_is_told_before_it_runs(monkeypatch):
    # in place of plans of six changed steps
    monkeypatch.setattr(memory, 'savings', lambda *_: [('--n_layer=1', GIB)])
    case = [*GPT2, '--batch_size=512', f'--total_batch_size={2**20}', '--gpu_memory_gb=16']
    out = printed(*case)
    assert 'does NOT fit in 16.00 GiB' in out and 'saved by --n_layer=1 (1.00 GiB)' in out
    held = planned(*case)['memory']
    assert not held['fits'] and 1 < held['checkpointing']['none']['largest_batch'] < 512
    auto = planned(*case, '--batch_size=auto')['memory']
    assert auto['fits'] and auto['batch_size'] * auto['micro_steps'] == 1024
    assert auto['batch_size'] <= held['checkpointing']['none']['largest_batch']


def test_the_table_and_the_json_say_the_same():
    arguments = [*GPT2, '--gpu=a100']  # a part of its name
    found, out = planned(*arguments), printed(*arguments)
    held, run = found['memory'], found['run']
    assert f'{held["total"] / GIB:.2f} GiB  in all: fits in 40.00 GiB' in out
    assert sum(held['phases'][held['peak_phase']].values()) == held['peak']
    assert f'{run["tokens_per_step"]:,} a step' in out and run['hours'] > 0
    assert 'no_such_dataset is not prepared' in out and 'one A100 with 40.00 GiB' in out


def test_processes_that_copy_and_that_share_the_model_are_planned():
    copies = planned(*GPT2, '--gpu_memory_gb=80', '--processes=8', '--tokens_per_s=9')
    alone = planned(*GPT2, '--gpu_memory_gb=80', '--tokens_per_s=9')
    assert alone['run']['tokens_per_step'] == copies['run']['tokens_per_step'] == 2**19
    assert alone['memory']['micro_steps'] == 8 * copies['memory']['micro_steps']
    assert copies['memory']['parallel'] == 'ddp' and not alone['memory']['parallels']
    too_small = copies['memory']['total'] / GIB - 0.1
    found = planned(*GPT2, f'--gpu_memory_gb={too_small}', '--processes=8')
    held, both = found['memory'], found['memory']['parallels']
    assert held['parallel'] == 'fsdp' and held['fits']
    assert both['ddp']['total'] == copies['memory']['total'] > held['available']
    assert both['fsdp']['total'] == held['total']
    assert both['fsdp']['largest_batch'] > both['ddp']['largest_batch']
    assert alone['disk']['checkpoint'] == pytest.approx(found['disk']['checkpoint'], rel=1e-6)


@pytest.fixture(scope='module')
def small(char_data):
    """The arguments of a plan for this machine, of the run of the fixture `trained`."""
    return [f'--dataset={char_data}', '--n_layer=2', '--n_head=2', '--n_embd=32',
            '--block_size=16', '--batch_size=4', '--gradient_accumulation_steps=2',
            '--max_iters=100', '--device=cpu']


def test_a_prepared_dataset_gives_vocabulary_tokens_and_a_checkpoints_size(small, char_data,
                                                                           trained):
    found = planned(*small, '--tokens_per_s=1000', '--gpu_hour_price=2')
    meta = json.loads((char_data / 'meta.json').read_text())
    tokens = meta['splits']['train']['tokens']
    assert found['model']['vocab_size'] == meta['vocab_size']
    assert found['run']['epochs'] == pytest.approx(100 * 128 / tokens)
    assert found['run']['hours'] == pytest.approx(12.8 / 3600)
    assert found['run']['price'] == pytest.approx(2 * 12.8 / 3600)
    assert found['disk']['dataset'] == 2 * tokens
    folder = next((trained / 'checkpoints').iterdir())
    written = sum(path.stat().st_size for path in folder.glob('*.safetensors'))
    assert written == pytest.approx(found['disk']['checkpoint'], rel=0.05)  # names beside


def test_every_mistake_is_reported_and_gpus_are_listed():
    with pytest.raises(UserError) as error:
        load_config(PlanConfig, ['--gpu=A1000', '--utilisation=2', '--processes=0', '--n_layer=x'])
    lines = str(error.value).splitlines()
    for words in ('utilisation=2', 'processes=0', "n_layer='x'"):
        assert any(words in line for line in lines)
    assert any("gpu='A1000'" in line and all(name in line for name in GPUS) for line in lines)


def test_without_a_gpu_it_plans_for_this_machine_and_measures_its_speed(small, monkeypatch):
    monkeypatch.setattr(plan.devices, 'device_memory', lambda *_: 4 * GIB)
    monkeypatch.setattr(plan, 'choose_training_dtype', lambda *_: ('bfloat16', 'measured'))
    found = planned(*small)
    machine, held, run = (found[key] for key in ('machine', 'memory', 'run'))
    assert machine['device'] == 'cpu' and machine['here']
    assert held['available'] == 4 * GIB and held['fits'] and held['overhead'] == 0
    # an honest clock: no CPU trains this model at a billion tokens a second
    assert 0 < run['tokens_per_s'] < 1e9 and 'here' in run['how']
    assert run['hours'] == pytest.approx(100 * 128 / run['tokens_per_s'] / 3600)
    assert not any(word in printed(*small, '--tokens_per_s=9') for word in ('CUDA', 'GPU'))
    run = planned(*small, f'--batch_size={2**28}')['run']  # it does not fit here
    assert run['tokens_per_s'] is run['hours'] is None and 'does not fit' in run['how']


def test_a_step_that_takes_long_is_timed_on_fewer_tokens(small, monkeypatch):
    config = load_config(PlanConfig, small)
    shape, cpu = config.gpt_config(93), torch.device('cpu')
    for core_speed, tokens in ((1e15, 'measured here'), (1e6, 'estimated from 1 × ')):
        monkeypatch.setattr(step_speed, 'core_speed', lambda dtype, found=core_speed: found)
        speed, how = step_speed.estimate_speed(shape, config, cpu, 'float32')
        assert speed > 0 and how.startswith(tokens)


def test_the_published_models_are_planned_without_their_weights():
    for name, *size in (('gpt2', 12, 12, 768), ('gpt2-medium', 24, 16, 1024),
                        ('gpt2-large', 36, 20, 1280), ('gpt2-xl', 48, 25, 1600)):
        start = Start(verifies=False)
        config = load_config(PlanConfig, [f'--init_from={name}', '--n_layer=3', '--block_size=512',
                                          '--dataset=no_such_dataset'], read_saved=start.read)
        shape, tokens, _ = plan.find_shape(config, start)
        assert [shape.n_layer, shape.n_head, shape.n_embd] == size
        assert shape.vocab_size == 50257 and shape.block_size == 512
        assert shape.bias and tokens is None


def find_shape(*argv):
    start = Start(verifies=False)
    return plan.find_shape(load_config(PlanConfig, argv, read_saved=start.read), start)[0]


def test_models_of_a_run_a_folder_and_nanogpt_are_planned_in_their_own_shape(trained, tmp_path):
    ours = GPTConfig(n_layer=3, n_head=2, n_embd=32, block_size=64, vocab_size=77)
    (tmp_path / 'config.json').write_text(json.dumps(  # and no weights beside
        {'model_type': 'gpt2', **ARCHITECTURES['gpt2'].write_config(ours)}))
    torch.save({'model': {}, 'model_args': {key: getattr(ours, key) for key in (*SIZES, 'bias')}},
               tmp_path / 'ckpt.pt')
    common = ['--block_size=16', '--dataset=no_such_dataset', '--dropout=0.1']
    expected = replace(ours, block_size=16, dropout=0.1)
    assert find_shape(f'--init_from={tmp_path}', *common) == expected
    assert find_shape(f'--init_from={tmp_path}/ckpt.pt', *common) == \
        replace(expected, mlp='gelu_erf')
    for start in ([f'--init_from={trained}'], ['--init_from=resume', f'--out_dir={trained}'],
                  ['--init_from=auto', f'--out_dir={trained}']):
        shape = find_shape(*start, *common)
        assert (shape.n_layer, shape.n_embd, shape.dropout) == (2, 32, 0.1)
    shape = find_shape('--init_from=auto', f'--out_dir={tmp_path}/new', '--n_layer=5', *common)
    assert shape.n_layer == 5


def test_minutes_are_planned_as_the_iterations_that_fit(char_data):
    own_text = [str(ROOT / 'config/own_text.py'), f'--dataset={char_data}', '--gpu=a100',
                '--minutes=2']
    found = planned(*own_text, '--tokens_per_s=1e5')
    assert 90 < 3600 * found['run']['hours'] <= 120
    assert found['run']['iterations'] * found['run']['tokens_per_step'] == found['run']['tokens']
    with pytest.raises(UserError, match='minutes=2'):
        printed(*own_text, '--gpu=', '--gpu_memory_gb=9')


def test_a_model_that_cannot_start_the_run_is_told_by_the_plan_too(
        trained, tmp_path, char_data, capsys, monkeypatch):
    for argv, words in ((['--init_from=gpt2', f'--dataset={char_data}'], 'one of 50257'),
                        ([f'--init_from={trained}', '--block_size=32'], 'at most 16 tokens'),
                        (['--init_from=gpt3'], "'gpt3' is neither"),
                        (['--init_from=resume', f'--out_dir={tmp_path}'], 'no checkpoint there')):
        assert words in fails(capsys, monkeypatch, plan.main, *argv)


def test_the_help_lists_the_keys_of_training_too(capsys):
    with pytest.raises(SystemExit):
        plan.main(['--help'])
    out = capsys.readouterr().out
    assert '--learning_rate=0.0006' in out and '--gpu_memory_gb=0.0' in out
