"""Reference curves: where a run lies beside one, and making them."""

import json

import numpy as np
import pytest
from helpers import fails

import plot
from plaingpt.monitoring import references
from plaingpt.monitoring.run_record import KEYS
from plaingpt.system.errors import UserError

CONFIG = {'total_batch_size': 0, 'batch_size': 2, 'block_size': 8, 'decay_lr': False, 'n_embd': 128,
          'gradient_accumulation_steps': 1, 'grad_clip': 0, 'max_iters': 0, 'check': 'auto',
          'warmup_iters': 0}
FACTS = {**dict.fromkeys(KEYS, ''), 'config': CONFIG, 'changed': {'n_embd': 128}, 'vocab_size': 65,
         'train_tokens': 1000, 'unigram_loss': 3.0, 'from_scratch': True,
         'data': {'folder': 'data/ours', 'source': {'corpus': 'ours'}}}
IGNORED = {'seed', 'out_dir'}


def curve(offset):
    return [{'iter': i, 'tokens': 16 * i, 'elapsed_s': float(i), 'val_loss': 4 - i / 500 + offset}
            for i in range(0, 1001, 100)]


@pytest.fixture
def made(tmp_path, monkeypatch):
    """made(offsets) → the Reference of runs with these, as a sweep over seeds leaves them"""
    monkeypatch.setattr(references, 'FOLDER', tmp_path / 'references')
    (tmp_path / 'references').mkdir()

    def made(offsets=(-0.01, 0.0, 0.01)):
        for seed, offset in enumerate(offsets):
            out_dir = tmp_path / 'seeds' / str(seed)
            out_dir.mkdir(parents=True, exist_ok=True)
            changed = {**FACTS['changed'], 'seed': seed, 'out_dir': str(out_dir)}
            (out_dir / 'run.json').write_text(json.dumps({**FACTS, 'changed': changed}))
            (out_dir / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, curve(offset))))
        references.write_reference('small', tmp_path / 'seeds', IGNORED)
        return references.read_reference('small')
    return made


def test_a_sentence_says_where_a_run_lies_and_what_it_does_otherwise(made):
    reference = made()
    for offset, words in ((0.005, 'inside the band of small'), (0.3, 'above (worse than) the band'),
                          (-0.3, 'below (better than) the band')):
        assert words in reference.compare(curve(offset))
    assert 'no evaluation yet' in reference.compare(curve(0.0)[:1])
    for changes, words in (({}, 'inside'),
                           ({'changed': {'n_embd': 64}}, 'unlike it, n_embd=64 (there 128)'),
                           ({'vocab_size': 66}, 'does not compare'),
                           ({'data': {'folder': 'x'}}, 'does not compare')):
        recipe = references.recipe_of({**FACTS, **changes}, IGNORED)
        assert words in reference.compare(curve(0.0), recipe)


def test_a_run_knows_the_reference_whose_settings_and_text_it_has(made, tmp_path, capsys):
    made()

    def found(changed=None, **facts):
        changed = {**FACTS['changed'], **(changed or {})}
        return references.find_reference({**FACTS, **facts, 'changed': changed}, IGNORED)
    assert found() == found({'seed': 9, 'out_dir': 'x'}) == found({'init_from': 'resume'}) \
        == 'small'
    assert found({'n_layer': 5}) is found(config={**CONFIG, 'batch_size': 5}) \
        is found({'init_from': 'gpt2'}, from_scratch=False) is found(vocab_size=9) is None
    out = tmp_path / 'out'
    out.mkdir()
    (out / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, curve(0.0))))
    for name, said in (('small', 'inside the band of small'), ('gone', 'out has no reference'),
                       (None, 'out has no reference')):
        (out / 'run.json').write_text(json.dumps({**FACTS, 'reference': name}))
        plot.main([str(out)])
        assert said in capsys.readouterr().out


@pytest.mark.parametrize('n', [3, 10])
def test_the_band_holds_a_new_seed_in_95_of_100(n, tmp_path, monkeypatch):
    monkeypatch.setattr(references, 'FOLDER', tmp_path)
    chance, found = np.random.default_rng(0), 0
    for _ in range(500):
        *seeds, new = chance.normal(2, 0.01, n + 1).tolist()
        (tmp_path / 'a.csv').write_text(
            f'# {{}}\niter,mean,std,seeds\n9,{np.mean(seeds)},{np.std(seeds, ddof=1)},{n}\n')
        (_, low, high), = references.read_reference('a').band
        found += low <= new <= high
    assert 460 <= found <= 490  # 475 are expected, and the deviation of that number is 5


def test_mistakes_are_one_line(made, tmp_path, capsys, monkeypatch):
    with pytest.raises(UserError, match='two runs or more of one recipe'):
        references.write_reference('small', tmp_path / 'nowhere', IGNORED)
    with pytest.raises(UserError, match='two runs or more of one recipe'):
        made([0.0])
    made()
    out = tmp_path / 'seeds/0'
    assert 'references/ has small' in fails(capsys, monkeypatch, plot.main, out,
                                            '--reference=big')
    for damaged in (b'', b'\xff', b'# {}\niter\n9\n', b'# {}\niter,mean,std,seeds\n9,a,b,c\n'):
        (tmp_path / 'references/small.csv').write_bytes(damaged)
        assert 'is damaged' in fails(capsys, monkeypatch, plot.main, out, '--reference=small')


def test_our_references_are_read():
    assert {'quickstart', 'shakespeare_char_cpu_fast'} <= set(references.names())
    for name in references.names():
        assert all(low < high for _, low, high in references.read_reference(name).band)
