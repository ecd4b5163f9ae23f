"""Reference curves: where a run lies beside one, and how one is made."""

import json
import re

import pytest
from processes import ROOT

from plaingpt.monitoring import references

FACTS = {'config': {'total_batch_size': 0, 'batch_size': 2, 'block_size': 8, 'n_embd': 128,
                    'gradient_accumulation_steps': 1, 'check': 'auto'},
         'changed': {'n_embd': 128}, 'vocab_size': 65, 'from_scratch': True,
         'data': {'folder': 'data/ours', 'source': {'corpus': 'ours'}}}
IGNORED = {'seed', 'out_dir'}


def curve(offset):
    return [{'iter': i, 'tokens': 16 * i, 'elapsed_s': float(i), 'val_loss': 4 - i / 500 + offset}
            for i in range(0, 1001, 100)]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A reference of three seeds, made as docs/hacking.md says."""
    monkeypatch.setattr(references, 'FOLDER', tmp_path / 'references')
    (tmp_path / 'references').mkdir()
    for seed, offset in enumerate((-0.01, 0.0, 0.01)):
        out_dir = tmp_path / 'seeds' / 'sweep-seed-cpu' / str(seed)
        out_dir.mkdir(parents=True)
        (out_dir / 'run.json').write_text(json.dumps(
            {**FACTS, 'changed': {**FACTS['changed'], 'seed': seed}}))
        (out_dir / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, curve(offset))))
    page = (ROOT / 'docs/hacking.md').read_text(encoding='utf-8')
    [code] = re.findall(r'^```python\n(.*?)^```$', page, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    exec(code.replace('NAME', 'small'), {})
    return {**FACTS, 'reference': 'small'}


def test_a_sentence_says_where_a_run_lies(small):
    for offset, words in ((0.005, 'inside the band of small'), (0.3, 'above (worse than) the band'),
                          (-0.3, 'below (better than) the band')):
        assert words in references.compare(curve(offset), small)
    for rows, facts in ((curve(0.0)[:1], small), (curve(0.0), {**small, 'reference': None})):
        assert 'has no reference' in references.compare(rows, facts)


def test_a_run_knows_the_reference_whose_settings_and_text_it_has(small):
    def found(changed=None, **facts):
        changed = {**FACTS['changed'], **(changed or {})}
        return references.find_reference({**FACTS, **facts, 'changed': changed}, IGNORED)
    config = FACTS['config']
    assert found() == found({'seed': 9, 'out_dir': 'x'}) == found({'init_from': 'resume'}) \
        == 'small'
    for other in (found({'n_layer': 5}), found(config={**config, 'batch_size': 5}),
                  found(config={**config, 'check': 'overfit'}), found(vocab_size=9),
                  found({'init_from': 'gpt2'}, from_scratch=False), found(data={'folder': 'x'})):
        assert other is None


def test_the_band_holds_a_new_seed_in_95_of_100(tmp_path, monkeypatch):
    monkeypatch.setattr(references, 'FOLDER', tmp_path)
    (tmp_path / 'a.csv').write_text('# {}\niter,mean,std,seeds\n9,2.0,0.3,3\n')
    (_, low, high), = references.read_band({'reference': 'a'})
    # 4.303: what Student's t with 2 degrees of freedom exceeds in 2.5 of 100
    reach = 4.303 * 0.3 * (4 / 3)**0.5
    assert (low, high) == (pytest.approx(2 - reach), pytest.approx(2 + reach))


def test_our_references_are_read():
    for name in ('quickstart', 'shakespeare_char_cpu', 'shakespeare_char_cpu_fast'):
        band = references.read_band({'reference': name})
        assert band and all(low < high for _, low, high in band)
