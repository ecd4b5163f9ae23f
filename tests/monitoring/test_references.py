"""Reference curves: where a run lies beside one, and making them."""

import json
import re

import numpy as np
import pytest
from helpers import fails

import plot
from plaingpt.monitoring import references
from plaingpt.monitoring.diagnosis import diagnose
from plaingpt.monitoring.references import Reference
from plaingpt.monitoring.run_record import KEYS
from plaingpt.system.errors import UserError
from plaingpt.training.settings import WITHOUT_EFFECT

CONFIG = {'decay_lr': False, 'n_embd': 128, 'seed': 1, 'grad_clip': 0, 'max_iters': 0,
          'check': 'auto', 'warmup_iters': 0}
FACTS = {**dict.fromkeys(KEYS, ''), 'config': CONFIG, 'changed': {}, 'versions': {},
         'machine': {'device': 'cpu', 'cpu': 'A CPU', 'cores': 2, 'processes': 1, 'system': ''},
         'vocab_size': 65, 'train_tokens': 1000, 'parameters': 500, 'unigram_loss': 3.0,
         'from_scratch': True, 'compile': False,
         'data': {'folder': 'data/ours', 'tokenizer': 'char', 'source': {'corpus': 'ours'}}}


def curve(offset, step=100):
    return [{'iter': i, 'tokens': 512 * i, 'elapsed_s': float(i), 'val_loss': 4 - i / 500 + offset}
            for i in range(0, 1001, step)]


def made(offsets=(-0.01, 0.0, 0.01)):
    return Reference('small', dict.fromkeys(range(len(offsets)), FACTS),
                     {i: curve(offset) for i, offset in enumerate(offsets)})


def write_runs(folder):
    """The runs of made() as folders, as a sweep over seeds leaves them."""
    for seed, rows in made().rows.items():
        out_dir = folder / str(seed)
        out_dir.mkdir(parents=True)
        (out_dir / 'run.json').write_text(json.dumps(
            {**FACTS, 'config': {**CONFIG, 'seed': seed, 'out_dir': str(out_dir)}}))
        (out_dir / 'metrics.jsonl').write_text('\n'.join(
            json.dumps({**row, 'sample': 'text'}) for row in rows))


def inside(reference, rows):
    """Whether a run's last validation loss lies in the band at its end."""
    _, low, high = reference.band()[-1]
    return low <= rows[-1]['val_loss'] <= high


def test_a_sentence_says_where_a_run_lies():
    for offset, words in ((0.005, 'inside the band of small (3 seeds)'),
                          (0.3, 'above (worse) the band'), (-0.3, 'below (better) the band')):
        assert words in made().compare('out', curve(offset))
        assert words in made().compare('out', curve(offset, step=250))  # evaluated elsewhere


def compared(**changes):
    return made().compare('out', curve(0.0), {**FACTS, **changes}, WITHOUT_EFFECT)


def test_a_run_on_other_text_is_not_compared():
    assert 'their losses do not compare' in compared(train_tokens=2000)
    assert 'their losses do not compare' in compared(vocab_size=66)
    assert 'their losses do not compare' in compared(train_tokens=990, data={'folder': 'other'})


def test_what_a_run_does_otherwise_than_the_reference_is_said():
    same = compared(config={**CONFIG, 'seed': 2})
    assert 'unlike the reference' not in same
    sentence = compared(config={**CONFIG, 'n_embd': 64}, train_tokens=990, parameters=200)
    assert 'inside' in sentence
    assert sentence.endswith(
        'unlike the reference: n_embd=64 (there 128), training tokens=990 (there 1000)')


def test_a_setting_that_the_reference_is_too_old_to_have_has_its_default_there():
    new = {**CONFIG, 'alibi': False, 'log_to': 'tensorboard'}
    assert 'unlike the reference' not in compared(config=new)
    sentence = compared(config={**new, 'alibi': True}, changed={'alibi': True})
    assert sentence.endswith('unlike the reference: alibi=True (there the default)')


def test_how_a_run_is_computed_and_watched_is_no_difference():
    same = compared(config={**CONFIG, 'seed': 2, 'parallel': 'fsdp', 'out_dir': 'here'})
    assert 'unlike the reference' not in same


def test_a_run_knows_the_reference_whose_settings_and_text_it_has(tmp_path, capsys):
    reference = references.read_reference('quickstart')
    run, ignored = reference.run, WITHOUT_EFFECT

    def found(changed=None, **facts):
        return references.find_reference(
            {**run, **facts, 'config': {**run['config'], **(changed or {})}}, ignored)

    assert found() == found({'seed': 9, 'out_dir': 'x'}) == found({'init_from': 'resume'}) \
        == 'quickstart'
    assert found({'n_layer': 5}) is found({'batch_size': 5}) is found(vocab_size=9) is None
    rows = next(iter(reference.rows.values()))
    (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    for name, said in (('quickstart', 'inside the band of quickstart'), ('gone', 'iteration 460')):
        (tmp_path / 'run.json').write_text(json.dumps({**run, 'reference': name}))
        plot.main([str(tmp_path)])
        assert said in capsys.readouterr().out


def test_there_is_no_verdict_where_the_reference_has_no_evaluation():
    early = [row for row in curve(0.0, step=20) if row['iter'] < 100]
    assert 'no evaluation between 51,200 and 512,000 tokens (100 and 1000 iterations' \
        in made().compare('out', early)
    assert 'has one seed' in made([0.0]).compare('out', curve(0.0))


def test_a_run_that_leaves_the_band_is_above_from_there_unless_it_comes_back():
    rows = curve(0.0)
    rows[1]['val_loss'] += 0.2
    sentence = made().compare('out', rows)
    assert 'lies inside the band of small (3 seeds) at the end' in sentence
    assert 'out of it at iteration 100,' in sentence
    rows = curve(0.0)
    for row in rows:
        row['val_loss'] += 0.2 if row['iter'] >= 600 else 0.0
    sentence = made().compare('out', rows)
    assert 'above (worse) the band of small (3 seeds) from iteration 600 on, by 0.15' in sentence


@pytest.mark.parametrize('n', [3, 10])
def test_the_band_holds_a_new_seed_in_95_of_100(n):
    chance, found = np.random.default_rng(0), 0
    for _ in range(500):
        *seeds, new = chance.normal(0, 0.01, n + 1).tolist()
        runs = [curve(offset, step=1000) for offset in [*seeds, new]]
        found += inside(Reference('small', {}, dict(enumerate(runs[:-1]))), runs[-1])
    assert 460 <= found <= 490  # 475 are expected, and the deviation of that number is 5


def test_a_reference_comes_back_as_it_was_written_and_is_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(references, 'FOLDER', tmp_path)
    write_runs(tmp_path / 'seeds')
    references.write_reference('small', tmp_path / 'seeds')
    found = references.read_reference('small')
    assert found.band() == made().band() and found.rows[0][0] == {'seed': 0, **curve(-0.01)[0]}
    assert str(tmp_path) not in (tmp_path / 'small.jsonl').read_text()
    out = tmp_path / 'out'
    out.mkdir()
    (out / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, curve(0.0))))
    plot.main([str(out), '--reference=small'])
    assert 'inside the band' in capsys.readouterr().out
    assert 'there are small' in fails(capsys, monkeypatch, plot.main, out, '--reference=big')


def test_a_damaged_reference_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(references, 'FOLDER', tmp_path)
    write_runs(tmp_path / 'seeds')
    references.write_reference('small', tmp_path / 'seeds')
    path = tmp_path / 'small.jsonl'
    whole = path.read_bytes().splitlines()
    for damaged in ([], [b'\xff\xfe'], [b'[]', *whole], whole[1:], [whole[0], whole[1][:9]],
                    [b'{"seed": 0, "run": 5}', *whole[1:]], whole[:1]):
        path.write_bytes(b'\n'.join(damaged))
        with pytest.raises(UserError, match='is damaged'):
            references.read_reference('small')


def test_a_reference_is_made_of_seeds_of_one_recipe_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(references, 'FOLDER', tmp_path / 'references')
    with pytest.raises(UserError, match='no runs'):
        references.write_reference('small', tmp_path / 'seeds')
    write_runs(tmp_path / 'seeds')
    path = tmp_path / 'seeds/1/run.json'
    path.write_text(re.sub(r'"n_embd": \d+', '"n_embd": 64', path.read_text()))
    with pytest.raises(UserError, match='seeds/1: its settings are not those'):
        references.write_reference('small', tmp_path / 'seeds')
    assert not (tmp_path / 'references').exists()


def test_our_references_give_no_alarm_and_each_seed_is_expected_by_the_others():
    names = sorted(path.stem for path in references.FOLDER.glob('*.jsonl'))
    assert {'quickstart', 'shakespeare_char_cpu_fast'} <= set(names)
    for name in names:
        found = references.read_reference(name)
        assert len(found.rows) >= (5 if name in ('quickstart', 'shakespeare_char_cpu_fast') else 3)
        outside = 0
        for seed, rows in found.rows.items():
            assert diagnose(rows, found.runs[seed]) == [], (name, seed)
            others = {other: found.rows[other] for other in found.rows if other != seed}
            outside += not inside(Reference(name, {}, others), rows)
        assert outside <= len(found.rows) // 10 + 1, name  # 5% are expected
