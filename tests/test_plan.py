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
from plaingpt.experiments import step_speed
from plaingpt.inference.hf_architectures import ARCHITECTURES, SIZES
from plaingpt.system.devices import GPUS
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import GIB
from plaingpt.training.memory_planner import batch_that_divides, predict, step_settings
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


@pytest.fixture
def known_savings(monkeypatch):
    """In place of plans of six changed steps."""
    monkeypatch.setattr(plan, 'savings', lambda *_: [('--n_layer=1', GIB)])


def test_a_batch_of_512_that_does_not_fit_is_told_before_it_runs(known_savings):
    case = [*GPT2, '--batch_size=512', f'--total_batch_size={2**20}', '--gpu_memory_gb=16']
    out = printed(*case)
    assert 'does NOT fit in 16.00 GiB' in out and 'saved by --n_layer=1 (1.00 GiB)' in out
    memory = planned(*case)['memory']
    best = memory['checkpointing']['none']
    assert not memory['fits'] and 1 < best['batch_size'] <= best['largest_batch'] < 512
    assert best['batch_size'] * best['accumulation'] == 1024
    config = load_config(PlanConfig, case)
    for more, fits in ((0, True), (1, False)):
        step = step_settings(replace(config, batch_size=best['largest_batch'] + more), 'bfloat16')
        assert (predict(config.gpt_config(50257), step).total <= 16 * GIB) == fits


def test_the_table_and_the_json_say_the_same():
    arguments = [*GPT2, '--gpu=a100']  # a part of its name
    found, out = planned(*arguments), printed(*arguments)
    assert f'{found["memory"]["total"] / 2**30:.2f} GiB  in all: fits in 40.00 GiB' in out
    assert sum(found['memory']['items'].values()) == found['memory']['peak']
    assert f'{found["tokens"]["per_step"]:,} a step' in out
    assert 'no_such_dataset is not prepared' in out and 'one A100 with 40.00 GiB' in out


def test_an_automatic_batch_is_the_largest_that_keeps_the_step():
    memory = planned(*GPT2, '--gpu_memory_gb=8', '--batch_size=auto')['memory']
    assert memory['fits'] and memory['batch_size'] * memory['micro_steps'] == 512
    assert memory['batch_size'] == memory['checkpointing']['none']['batch_size']


def test_processes_share_a_step():
    one, eight = (planned(*GPT2, '--gpu=H100', f'--processes={n}') for n in (1, 8))
    assert one['tokens']['per_step'] == eight['tokens']['per_step'] == 2**19
    assert one['memory']['micro_steps'] == 8 * eight['memory']['micro_steps']
    best = eight['memory']['checkpointing']['none']
    assert best['batch_size'] * best['accumulation'] == 512 and best['batch_size'] <= 512 / 8
    assert eight['time']['hours'] == pytest.approx(one['time']['hours'] / 8)


def test_processes_that_copy_and_that_share_the_model_are_planned():
    copies = planned(*GPT2, '--gpu_memory_gb=80', '--processes=8')
    assert copies['memory']['parallel'] == 'ddp'
    too_small = copies['memory']['total'] / GIB - 0.1
    arguments = [*GPT2, f'--gpu_memory_gb={too_small}', '--processes=8']
    found, out = planned(*arguments), printed(*arguments)
    memory, both = found['memory'], found['memory']['parallels']
    assert memory['parallel'] == 'fsdp' and memory['fits']
    assert both['ddp']['total'] == copies['memory']['total'] > memory['available']
    assert both['fsdp']['total'] == memory['total']
    assert both['fsdp']['largest_batch'] > both['ddp']['largest_batch']
    assert 'parallel: train.py takes fsdp (ddp is planned to take ' in out
    assert out.count(f'{memory["total"] / GIB:.2f} GiB, largest micro-batch '
                     f'{both["fsdp"]["largest_batch"]}\n') == 2  # of checkpointing 'none' too
    alone = planned(*GPT2, '--gpu_memory_gb=80')
    assert alone['disk']['checkpoint'] == pytest.approx(found['disk']['checkpoint'], rel=1e-6)
    assert alone['memory']['parallel'] == 'ddp' and not alone['memory']['parallels']


@pytest.fixture(scope='module')
def small(char_data):
    """The arguments of a plan for this machine, of the run of the fixture `trained`."""
    return [f'--dataset={char_data}', '--n_layer=2', '--n_head=2', '--n_embd=32',
            '--block_size=16', '--batch_size=4', '--gradient_accumulation_steps=2',
            '--max_iters=100', '--device=cpu']


@pytest.fixture(scope='module')
def small_plan(small):
    return planned(*small, '--tokens_per_s=1000', '--gpu_hour_price=2')


def test_a_prepared_dataset_gives_vocabulary_tokens_and_epochs(small_plan, char_data):
    meta = json.loads((char_data / 'meta.json').read_text())
    tokens = meta['splits']['train']['tokens']
    assert small_plan['vocab_size'] == meta['vocab_size']
    assert small_plan['tokens']['dataset'] == tokens
    assert small_plan['tokens']['epochs'] == pytest.approx(100 * 128 / tokens)
    assert small_plan['time']['hours'] == pytest.approx(12.8 / 3600)
    assert small_plan['time']['price'] == pytest.approx(2 * 12.8 / 3600)
    assert small_plan['disk']['dataset'] == 2 * tokens


def test_the_size_of_a_checkpoint_is_what_training_writes(small_plan, trained):
    folder = next((trained / 'checkpoints').iterdir())
    written = sum(path.stat().st_size for path in folder.glob('*.safetensors'))
    assert written == pytest.approx(small_plan['disk']['checkpoint'], rel=0.05)  # names beside


def mistakes(*argv):
    with pytest.raises(UserError) as error:
        load_config(PlanConfig, argv)
    return str(error.value).splitlines()


def test_every_mistake_is_reported_and_gpus_are_listed():
    lines = mistakes('--gpu=A1000', '--utilisation=2', '--processes=0', '--n_layer=x')
    for words in ('utilisation=2', 'processes=0', "n_layer='x'"):
        assert any(words in line for line in lines)
    assert any("gpu='A1000'" in line and all(name in line for name in GPUS)
               for line in lines)
    lines = mistakes('--n_head=7', '--total_batch_size=7')
    for words in ('n_head=7', 'total_batch_size=7'):
        assert any(words in line for line in lines)


def test_without_a_gpu_it_plans_for_this_machine_and_measures_its_speed(small, monkeypatch):
    monkeypatch.setattr(plan.devices, 'device_memory', lambda device: (8 * GIB, 4 * GIB))
    monkeypatch.setattr(plan, 'choose_training_dtype', lambda *_: ('bfloat16', 'measured'))
    found = planned(*small)
    machine, memory, time = (found[key] for key in ('machine', 'memory', 'time'))
    assert machine['device'] == 'cpu' and machine['here'] and machine['total'] == 8 * GIB
    assert memory['available'] == 4 * GIB and memory['fits'] and memory['overhead'] == 0
    assert memory['dtype'] == 'bfloat16'
    # an honest clock: no CPU trains this model at a billion tokens a second
    assert 0 < time['tokens_per_s'] < 1e9 and 'here' in time['how']
    assert time['hours'] == pytest.approx(100 * 128 / time['tokens_per_s'] / 3600)
    out = printed(*small, '--tokens_per_s=1000')
    assert out.startswith('memory of cpu, ') and '4.00 GiB free, of 8.00 GiB' in out
    assert not any(word in out for word in ('CUDA', 'GPU'))


def test_an_automatic_batch_is_what_train_takes_on_this_machine(small):
    big = [*small, '--tokens_per_s=9', '--batch_size=auto', f'--total_batch_size={2**30}']
    found = planned(*big)['memory']
    config = load_config(PlanConfig, big)
    step = step_settings(replace(config, batch_size=1), found['dtype'], 'cpu')
    batch_size, _ = batch_that_divides(config.gpt_config(93), step, found['available'], 2**26)
    assert found['batch_size'] == batch_size > 1 and found['fits'] and found['micro_steps'] > 1
    assert found['batch_size'] * found['micro_steps'] == 2**26


def test_what_does_not_fit_here_is_not_measured(small, known_savings):
    time = planned(*small, f'--batch_size={2**28}')['time']
    assert time['tokens_per_s'] is time['hours'] is None and 'does not fit' in time['how']


def test_a_step_that_takes_long_is_timed_on_fewer_tokens(monkeypatch):
    config = load_config(PlanConfig, ['--n_layer=2', '--n_embd=1920', '--batch_size=64',
                                      '--gradient_accumulation_steps=5'])
    work = step_speed.Workload(config, config.gpt_config(500), torch.device('cpu'), 'float32',
                               False)
    sizes = []

    def parts(work, *size):  # a device whose times are exactly so
        sizes.append(size)
        return 1e-11 * step_speed.flops(work, *size), 0.2

    monkeypatch.setattr(step_speed, 'time_parts', parts)
    micro_s = 1e-11 * step_speed.flops(work, 64, 1024)
    for matmul_flops, timed in ((1e15, (64, 1024)), (1e13, (8, 1024)), (1e9, (1, 32))):
        monkeypatch.setattr(step_speed, 'matmul_flops', lambda *_, found=matmul_flops: found)
        speed, how = step_speed.estimate_speed(work)
        assert speed == pytest.approx(config.step_tokens() / (5 * micro_s + 0.2))
        assert sizes.pop() == timed
        assert how == ('measured here' if timed == (64, 1024)
                       else f'estimated from {timed[0]} × {timed[1]} tokens here')


def test_the_parts_of_a_step_are_timed():
    config = load_config(PlanConfig, ['--n_layer=1', '--n_head=2', '--n_embd=32'])
    work = step_speed.Workload(config, config.gpt_config(300), torch.device('cpu'), 'float32',
                               False)
    assert all(seconds > 0 for seconds in step_speed.time_parts(work, 4, 16))


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
    assert 90 < 3600 * found['time']['hours'] <= 120
    assert found['tokens']['iterations'] * found['tokens']['per_step'] == found['tokens']['total']
    with pytest.raises(UserError, match='minutes=2'):
        printed(*own_text, '--gpu=', '--gpu_memory_gb=9')


def test_a_model_that_cannot_start_the_run_is_told_by_the_plan_too(
        trained, tmp_path, char_data, capsys, monkeypatch):
    for argv, words in ((['--init_from=gpt2', f'--dataset={char_data}'], 'one of 50257'),
                        (['--init_from=gpt2', '--dataset=shakespeare_char'], 'vocabulary of 65'),
                        ([f'--init_from={trained}', '--block_size=32'], 'at most 16 tokens'),
                        (['--init_from=gpt3'], "'gpt3' is neither"),
                        (['--init_from=resume', f'--out_dir={tmp_path}'], 'no checkpoint there')):
        assert words in fails(capsys, monkeypatch, plan.main, *argv)


def test_the_help_lists_the_keys_of_training_too(capsys):
    with pytest.raises(SystemExit):
        plan.main(['--help'])
    out = capsys.readouterr().out
    assert '--learning_rate=0.0006' in out and '--gpu_memory_gb=0.0' in out
