import json

import pytest
from helpers import fails

import plan
from configurator import load_config
from plaingpt.system.devices import GPUS
from plaingpt.system.errors import UserError
from plan import PlanConfig

GPT2 = ['config/gpt2_124m.py', '--dataset=no_such_dataset']


def planned(capsys, *arguments):
    plan.main([*arguments, '--json'])
    return json.loads(capsys.readouterr().out)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    from helpers import ROOT
    monkeypatch.chdir(ROOT)


def test_a_batch_of_512_that_does_not_fit_is_told_before_it_runs(capsys):
    case = ['--n_layer=12', '--n_head=8', '--n_embd=768', '--block_size=1024',
            '--vocab_size=33283', '--batch_size=512', '--gradient_accumulation_steps=1',
            '--dataset=no_such_dataset', '--gpu_memory_gb=40']
    plan.main([*case, '--dtype=float32', '--loss_chunk_tokens=0'])
    out = capsys.readouterr().out
    assert 'logits of this batch are 65.01 GiB each copy' in out
    assert 'does NOT fit in 40.00 GiB' in out
    memory = planned(capsys, *case)['memory']
    best = memory['checkpointing']['none']
    assert not memory['fits'] and 1 < best['batch_size'] <= best['largest_batch'] < 512
    assert best['batch_size'] * best['accumulation'] == 512
    assert planned(capsys, *case, f'--batch_size={best["largest_batch"]}')['memory']['fits']
    assert not planned(capsys, *case, f'--batch_size={best["largest_batch"] + 1}')['memory']['fits']


def test_the_table_and_the_json_say_the_same(capsys):
    arguments = [*GPT2, '--gpu=A100']
    found = planned(capsys, *arguments)
    plan.main(arguments)
    out = capsys.readouterr().out
    assert f'{found["memory"]["total"] / 2**30:.2f} GiB  in all: fits in 40.00 GiB' in out
    assert sum(found['memory']['items'].values()) == found['memory']['peak']
    assert f'{found["tokens"]["per_step"]:,} a step' in out
    assert 'no_such_dataset is not prepared' in out


def test_an_automatic_batch_is_the_largest_that_keeps_the_step(capsys):
    memory = planned(capsys, *GPT2, '--gpu_memory_gb=16', '--batch_size=auto')['memory']
    assert memory['fits'] and memory['batch_size'] * memory['micro_steps'] == 512
    assert memory['batch_size'] == memory['checkpointing']['none']['batch_size']


def test_processes_share_a_step(capsys):
    one, eight = (planned(capsys, *GPT2, '--gpu=H100', f'--processes={n}') for n in (1, 8))
    assert one['tokens']['per_step'] == eight['tokens']['per_step'] == 2**19
    assert one['memory']['micro_steps'] == 8 * eight['memory']['micro_steps']
    assert eight['time']['hours'] == pytest.approx(one['time']['hours'] / 8)
    assert eight['memory']['items']['gradient buckets'] > 0


def test_a_prepared_dataset_gives_vocabulary_tokens_and_epochs(char_data, capsys):
    meta = json.loads((char_data / 'meta.json').read_text())
    found = planned(capsys, f'--dataset={char_data}', '--block_size=64', '--batch_size=4',
                    '--gradient_accumulation_steps=2', '--max_iters=100', '--n_layer=2',
                    '--tokens_per_s=1000', '--gpu_hour_price=2', '--lr_decay_iters=9000')
    tokens = meta['splits']['train']['tokens']
    assert found['vocab_size'] == meta['vocab_size'] and found['tokens']['dataset'] == tokens
    assert found['tokens']['epochs'] == pytest.approx(100 * 512 / tokens)
    assert found['time']['hours'] == pytest.approx(51.2 / 3600)
    assert found['time']['price'] == pytest.approx(2 * 51.2 / 3600)
    assert found['disk']['dataset'] == 2 * tokens


def test_the_size_of_a_checkpoint_is_what_training_writes(trained, char_data, capsys):
    shape = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--block_size=16', '--batch_size=4']
    expected = planned(capsys, f'--dataset={char_data}', *shape)['disk']['checkpoint']
    folder = next((trained / 'checkpoints').iterdir())
    written = sum(path.stat().st_size for path in folder.glob('*.safetensors'))
    assert written == pytest.approx(expected, rel=0.05)  # names and step counts beside


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


def test_an_automatic_batch_needs_a_gpu_to_fit(capsys, monkeypatch):
    assert '--gpu_memory_gb' in fails(capsys, monkeypatch, plan.main, *GPT2, '--batch_size=auto')


def test_the_help_lists_the_keys_of_training_too(capsys):
    with pytest.raises(SystemExit):
        plan.main(['--help'])
    out = capsys.readouterr().out
    assert '--learning_rate=0.0006' in out and '--gpu_memory_gb=0.0' in out
