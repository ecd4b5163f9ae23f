"""Reference curves: where a run lies beside one, and how one is made."""

import json
import re
from dataclasses import asdict

import pytest
from processes import ROOT

from configurator import load_config
from plaingpt.core.settings import NOT_COMPARED, TrainConfig
from plaingpt.monitoring import references
from plaingpt.monitoring.run_folder import changed_settings

FACTS = {'config': {'total_batch_size': 0, 'batch_size': 2, 'block_size': 8, 'n_embd': 128,
                    'gradient_accumulation_steps': 1, 'check': 'auto'},
         'changed': {'n_embd': 128}, 'vocab_size': 65, 'from_scratch': True,
         'data': {'folder': 'data/ours', 'source': {'corpus': 'ours'}}}
IGNORED = {'seed', 'out_dir'}


def curve(offset):
    return [{'iter': i, 'tokens': 16 * i, 'elapsed_s': float(i), 'val_loss': 4 - i / 500 + offset}
            for i in range(0, 1001, 100)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """It takes the place of docs/references/."""
    monkeypatch.setattr(references, 'FOLDER', tmp_path / 'references')
    (tmp_path / 'references').mkdir()
    return tmp_path / 'references'


@pytest.fixture
def small(tmp_path, folder):
    """A reference of three seeds, made as docs/hacking.md says."""
    for seed, offset in enumerate((-0.01, 0.0, 0.01)):
        out_dir = tmp_path / 'seeds' / 'sweep-seed-cpu' / str(seed)
        out_dir.mkdir(parents=True)
        (out_dir / 'run.json').write_text(json.dumps(
            {**FACTS, 'changed': {**FACTS['changed'], 'seed': seed}}))
        (out_dir / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, curve(offset))))
    page = (ROOT / 'docs/hacking.md').read_text(encoding='utf-8')
    [code] = re.findall(r'^```python\n(.*?)^```$', page, re.M | re.S)
    exec(code.replace('NAME', 'small'), {})
    return {**FACTS, 'reference': 'small'}


@pytest.mark.parametrize('offset, place', [(0.005, 'inside'), (0.3, 'above'), (-0.3, 'below')])
def test_a_run_is_compared_with_the_band_of_its_reference(offset, place, small):
    assert place in references.compare(curve(offset), small)


@pytest.mark.parametrize('facts', [
    {}, {'changed': {'n_embd': 128, 'seed': 9, 'out_dir': 'x'}},
    {'changed': {'n_embd': 128, 'init_from': 'resume'}}], ids=str)
def test_a_run_has_the_reference_of_its_settings(facts, small):
    assert references.find_reference({**FACTS, **facts}, IGNORED) == 'small'


@pytest.mark.parametrize('in_file, in_run', [('average_decay', 'ema_decay'),
                                               ('ema_decay', 'average_decay')])
def test_a_setting_with_a_former_name_has_the_same_reference(in_file, in_run, folder):
    recipe = references.recipe_of(FACTS, IGNORED)
    header = json.dumps({**recipe, 'settings': {**recipe['settings'], in_file: 0.9}})
    (folder / 'a.csv').write_text(f'# {header}\niter,mean,std,seeds\n')
    run = {**FACTS, 'changed': {**FACTS['changed'], in_run: 0.9}}
    assert references.find_reference(run, IGNORED) == 'a'


@pytest.mark.parametrize('facts', [
    {'changed': {'n_embd': 128, 'n_layer': 5}}, {'config': {**FACTS['config'], 'batch_size': 5}},
    {'config': {**FACTS['config'], 'check': 'overfit'}}, {'vocab_size': 9},
    {'from_scratch': False}, {'data': {'folder': 'x'}}], ids=str)
def test_a_run_of_other_settings_has_no_reference(facts, small):
    assert references.find_reference({**FACTS, **facts}, IGNORED) is None
    assert 'no reference' in references.compare(curve(0.0), {**FACTS, 'reference': None})


def test_the_band_is_the_95_percent_prediction_interval_of_a_new_seed(folder):
    (folder / 'a.csv').write_text('# {}\niter,mean,std,seeds\n9,2.0,0.3,3\n')
    [(_, low, high)] = references.read_band({'reference': 'a'})
    # 4.3027: what Student's t with 2 degrees of freedom exceeds in 2.5 of 100
    reach = 4.3027 * 0.3 * (4 / 3)**0.5
    assert (low, high) == pytest.approx((2 - reach, 2 + reach), abs=1e-4)


OURS = ['quickstart', 'shakespeare_char_cpu', 'shakespeare_char_cpu_fast']


@pytest.mark.parametrize(('recipe', 'options', 'expected'), [
    *((name, [], name) for name in OURS),
    # which auto gives, and which it does not
    ('shakespeare_char_cpu', ['--lr_decay_iters=2000'], 'shakespeare_char_cpu'),
    ('shakespeare_char_cpu', ['--lr_decay_iters=1999'], None)])
def test_our_recipes_have_their_references(recipe, options, expected):
    config = load_config(TrainConfig, [f'config/{recipe}.py', *options])
    header, *_ = (references.FOLDER / f'{recipe}.csv').read_text(encoding='utf-8').splitlines()
    reference = json.loads(header.removeprefix('#'))
    run = {'config': asdict(config), 'changed': changed_settings(config), 'from_scratch': True,
           'vocab_size': reference['vocab_size'],
           'data': {'source': {'corpus': reference['corpus']}}}
    assert references.find_reference(run, NOT_COMPARED) == expected


def test_our_references_can_be_read():
    for name in OURS:
        band = references.read_band({'reference': name})
        assert band
        assert all(low < high for _, low, high in band)
