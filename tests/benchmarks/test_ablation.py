import pytest
from helpers import fails

import bench
from plaingpt.benchmarks import grid
from plaingpt.benchmarks.ablation import compare, draw_ablation, format_table


def runs(**losses):
    """{'base': final losses of seeds 1, 2, …} → runs that fall linearly from 4 in 100 steps."""
    return [{'variant': name, 'seed': seed, 'final_loss': loss, 'failed': '' if loss else 'no',
             'step_ms': 10.0 if name == 'base' else 12.0,
             'curve': [(0.0, 4.0), (1.0 if name == 'base' else 1.2, loss)]}
            for name, of_seeds in losses.items() for seed, loss in enumerate(of_seeds)]


def test_a_variant_is_compared_with_the_base_of_the_same_seeds():
    base, better = compare(runs(base=[2.0, 3.0, 2.5], better=[1.5, 2.0, 2.5]))
    assert base['change'] == base['error'] == 0 and base['step_time'] == 1
    assert better['change'] == pytest.approx(-0.5)
    assert better['error'] == pytest.approx(0.5 / 3**0.5)  # -0.5, -1 and 0
    # 80 of 100 steps to 2 on the way to 1.5, 50 to 3 on the way to 2, 100 to 2.5
    assert better['steps'] == pytest.approx((80 + 50 + 100) / 3) and base['steps'] == 100
    assert better['step_time'] == pytest.approx(1.2)


def test_what_is_not_reached_or_failed_has_no_number(tmp_path):
    found = runs(base=[2.0, 2.0], worse=[2.5, 2.6], broken=[2.0, None])
    _, worse, broken = compare(found)
    assert worse['steps'] is None and worse['change'] == pytest.approx(0.55)
    assert {broken[key] for key in ('final_loss', 'change', 'steps', 'step_time')} == {None}
    text = format_table(found)
    assert 'broken, seed 1 failed: no' in text and '+0.5500' in text and '± 0.0500' in text
    draw_ablation(found, tmp_path / 'ablation.png')
    assert (tmp_path / 'ablation.png').stat().st_size > 5_000


def test_settings_are_combined_and_what_follows_from_them_follows():
    words = ['--ablate', '--set', 'learning_rate=1e-3,2e-3', '--set=conv=0,4', '--max_iters=7']
    config, _, argv = bench.read_config(bench.one_set(words))
    variants = bench.read_variants(config, argv)
    assert list(variants) == ['learning_rate=1e-3, conv=0', 'learning_rate=1e-3, conv=4',
                              'learning_rate=2e-3, conv=0', 'learning_rate=2e-3, conv=4']
    assert [one.conv for one in variants.values()] == [0, 4, 0, 4]
    assert variants['learning_rate=2e-3, conv=4'].min_lr == pytest.approx(2e-4)  # a tenth
    assert {one.max_iters for one in variants.values()} == {7}


def test_one_by_one_each_change_stands_alone():
    words = ['--ablate', '--set', 'learning_rate=1e-3,2e-3,3e-3', '--set=conv=4,0', '--one_by_one']
    config, _, argv = bench.read_config(bench.one_set(words))
    variants = bench.read_variants(config, argv)
    assert {name: (one.learning_rate, one.conv) for name, one in variants.items()} == {
        'base': (1e-3, 4), 'learning_rate=2e-3': (2e-3, 4), 'learning_rate=3e-3': (3e-3, 4),
        'conv=0': (1e-3, 0)}


def test_a_wrong_choice_is_named_before_anything_is_trained(capsys, monkeypatch):
    monkeypatch.setattr(grid, 'train_once', None)
    for words, said in (
            ('--ablate', 'say what to change, as --set conv=0,4'),
            ('--ablate --set conv=4', '--set conv=4: give a setting, once, and two values'),
            ('--ablate --set conf=0,4', "unknown key 'conf'"),
            ('--ablate --set conv=0,4 --set=conv=0,8', '--set conv=0,8: give a setting, once'),
            ('--set conv=0,4', 'are for --ablate'),
            ('--ablate --set max_iters=200,5 --warmup_iters=2 --log_interval=50 --vocab_size=65',
             'log_interval=50 is more than max_iters=5')):
        assert said in fails(capsys, monkeypatch, bench.main, *words.split()), words


def test_seeds_follow_one_another_and_a_second_call_makes_none_again(monkeypatch, tmp_path):
    made = []

    def train(config):
        made.append((config.seed, config.conv))
        return {'final_loss': 3.0 - config.conv / 10, 'step_ms': 10.0, 'failed': '',
                'curve': [(0.0, 4.0), (1.0, 3.0 - config.conv / 10)]}

    monkeypatch.setattr(grid, 'train_once', train)
    words = ['--ablate', '--set', 'conv=0,4', '--seeds=2', '--seed=5', f'--save={tmp_path}',
             '--vocab_size=65']
    bench.main(words)
    assert made == [(5, 0), (5, 4), (6, 0), (6, 4)]
    bench.main([*words, '--json'])
    assert len(made) == 4
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ['.csv', '.jsonl', '.md', '.png']
